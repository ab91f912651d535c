"""stats()["grad_norm"] is the norm of this rank's gradients before their exchange, and costs nothing where nobody asks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from training import SHAPES, Training, draw

import gradcomp
from gradcomp.engine import gradient_norm
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters
from gradcomp.native import kernels
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make


def norm_of(grads: Any) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in grads.values()))


@pytest.mark.parametrize("spec", ["topk", "dense", "orq", "topk:momentum=0", "half"])
@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16])
def test_it_is_the_norm_of_the_rank_s_own_gradients(spec: str, form: torch.dtype) -> None:
    simulation = gradcomp.Simulation(spec, SHAPES, 2, bucket_mb=1e-4)
    assert simulation.stats()["buckets"] > 1 and simulation.stats()["grad_norm"] is None
    for step in range(3):
        grads = [{name: grad.to(form) for name, grad in own.items()} for own in draw(step, ranks=2)]
        wanted = norm_of(grads[0])  # stats() are those of rank 0
        simulation.step(grads)
        assert simulation.stats()["grad_norm"] == pytest.approx(wanted, rel=1e-6)


def test_it_is_the_gradient_s_where_updates_are_directions() -> None:
    training = Training("topk", torch.optim.AdamW, ranks=2)
    training.simulation.stats()
    training.step(grads := draw(1, ranks=2))
    assert training.simulation.stats()["grad_norm"] == pytest.approx(norm_of(grads[0]), rel=1e-6)


def test_it_is_without_the_loss_scale() -> None:
    scaler, model = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.nn.Linear(3, 2)
    network, parameters = MemoryNetwork(Board(1), 0, 1), Parameters(model.named_parameters())
    for spec in ("topk", "dense"):
        session = Session(make(spec), parameters, network, Options(None, scaler), Door())
        session.reducer.stats()
        model.zero_grad()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        session.begin()
        for slot in session.slots.slots:
            session.ready(slot)
        session.finish()
        assert session.reducer.stats()["grad_norm"] == pytest.approx(math.sqrt(8))


def test_only_steps_after_a_question_measure_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    sum_squares = kernels.sum_squares
    monkeypatch.setattr(kernels, "sum_squares", lambda *given: calls.append(1) or sum_squares(*given))
    simulation = gradcomp.Simulation("orq", SHAPES, 1)
    simulation.step(draw(0))
    assert not calls
    simulation.stats()
    for step in range(gradient_norm.WATCHED + 20):
        simulation.step(draw(step))
    assert len(calls) == gradient_norm.WATCHED
    assert simulation.stats()["grad_norm"] == pytest.approx(norm_of(draw(gradient_norm.WATCHED - 1)[0]))
