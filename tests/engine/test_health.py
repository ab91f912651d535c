"""The health of residuals: figures of stats(), and one warning about a residual that grows without bound."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradcomp
from gradcomp.engine import health
from gradcomp.engine.health import INTERVAL

SHAPES = {"w": (60, 50), "b": (20,)}


def train(spec: str, steps: int, grad: Callable[[int], dict[str, Tensor]]) -> tuple[gradcomp.Simulation, list[str]]:
    """Simulate two ranks with equal gradients. Return the simulation and the texts of all warnings."""
    simulation = gradcomp.Simulation(spec, SHAPES, 2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(steps):
            simulation.step([grad(step)] * 2)
    return simulation, [str(each.message) for each in seen]


def drawn(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def figures(simulation: gradcomp.Simulation) -> dict[str, Any]:
    (found,) = simulation.stats()["health"]
    return dict(found)


def test_the_figures_are_those_of_the_last_measured_step() -> None:
    spec = "topk:ratio=0.02,wire=exact"
    before, _ = train(spec, INTERVAL - 1, drawn)
    assert before.stats()["health"] == []
    waits = torch.cat([each.flatten() for each in before.residual(0).values()]).double()
    simulation, _ = train(spec, INTERVAL, drawn)
    left = torch.cat([each.flatten() for each in simulation.residual(0).values()]).double()
    grad = torch.cat([drawn(INTERVAL - 1)[name].flatten() for name in SHAPES]).double()
    found = figures(simulation)
    assert found["layers"] == ["b", "w"]
    assert found["taken"] == pytest.approx(1 - float(left.square().sum() / (waits + grad).square().sum()), rel=1e-5)
    assert found.keys() == {"layers", "taken"}


@pytest.mark.parametrize("momentum", ["0", "0.9"])
def test_healthy_residuals_are_not_warned_of(momentum: str) -> None:
    for spec in ("topk:ratio=0.001", "sdagc:lam=3.3", "bingrad:feedback=true"):
        assert train(f"{spec},momentum={momentum}", 12 * INTERVAL, drawn)[1] == []


def test_a_residual_from_which_nothing_is_taken_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gradcomp.exchanges.quantised.Quantiser._clip", lambda self, deviations: torch.zeros(2 * len(deviations))
    )
    _, texts = train("terngrad:sigmas=2.5,feedback=true", 6 * INTERVAL, drawn)
    (text,) = {*texts}
    assert len(texts) == 2, "one on each rank"
    assert "terngrad" in text and "'b' and 1 more layers grows without bound" in text
    assert "3 of 3 measured steps took nothing out of it" in text and "feedback=false" in text


def test_a_residual_that_grows_exponentially_is_warned_of_once() -> None:
    _, texts = train("topk:ratio=0.001", 10 * INTERVAL, lambda step: {n: 1.1**step * each for n, each in drawn(step).items()})
    (text,) = {*texts}
    assert "it grew 1.5-fold 8 times in a row" in text and "topk" in text and "clip=" in text


def test_a_layer_of_equal_gradients_is_sent() -> None:
    """Its standard deviation is 0, and clipping at multiples of it left nothing."""
    for spec in ("terngrad:sigmas=2.5", "orq:levels=3,sigmas=1.5", "linear:sigmas=2", "bingrad:sigmas=2"):
        simulation = gradcomp.Simulation(spec, SHAPES, 2)
        grad = {name: torch.full(shape, 0.5) for name, shape in SHAPES.items()}
        updates = [simulation.step([grad] * 2) for _ in range(5)]
        mean = sum(float(update["w"].mean()) for update in updates) / 5
        assert math.isclose(mean, 0.5, rel_tol=0.3), spec


def test_a_layer_that_only_flushes_send_is_healthy() -> None:
    assert train("sdagc:lam=16,flush=7", 6 * INTERVAL, drawn)[1] == []


def test_a_measured_step_with_a_gradient_that_is_not_finite_is_left_out() -> None:
    def grad(step: int) -> dict[str, Tensor]:
        return {name: each * (math.nan if step == 2 * INTERVAL - 1 else 1) for name, each in drawn(step).items()}

    simulation, _ = train("topk:ratio=0.02", 2 * INTERVAL, grad)
    before, _ = train("topk:ratio=0.02", INTERVAL, grad)
    assert figures(simulation) == figures(before)
    json.dumps(simulation.stats(), allow_nan=False)


SPARSE = {"w": (200, 100), "b": (20,)}


def test_the_remedy_names_the_knobs_of_the_spec() -> None:
    named = {
        "sdagc": "raise density=0.01",
        "sdagc:lam=8": "lower lam=8",
        "topk:by_host=true": "raise ratio=0.01",
        "orq:levels=9,group=512": "raise levels=9 or lower group=512",
        "dense:feedback=true": "",
    }
    for spec, knobs in named.items():
        found = health.remedy(gradcomp.make(spec))
        assert found == (f"Send more: {knobs}" if knobs else "Choose a spec that sends more"), spec
    for name in gradcomp.names():
        health.remedy(gradcomp.make(name))
