"""The comparison with dense: its cosine and its error are those of the updates and of the mean of what ranks came with."""

from __future__ import annotations

import math
from typing import Any

import gradients
import pytest
import torch
from torch import Tensor

import gradcomp
from gradcomp import telemetry

N, WORLD = 3000, 3
SPECS = [
    "dense",
    "dense:feedback=true",
    "topk:ratio=0.05",
    "orq:group=128",
    "sign",
    "gs_sgd:ratio=0.02",
    "topk:ratio=0.05,clip=0.5",
]


def figures(cosine_of: Tensor, mean: Tensor) -> tuple[float, float]:
    """The cosine of two vectors, and the first one's error relative to the second."""
    a, b = cosine_of.double(), mean.double()
    return float(a @ b / (a.norm() * b.norm())), float((a - b).norm() / b.norm())


def drawn(step: int) -> list[Tensor]:
    return [gradients.draw("heavy", N, 100 * step + rank) for rank in range(WORLD)]


@pytest.mark.parametrize("spec", SPECS)
def test_figures_are_those_of_update_and_mean_gradient(spec: str, device: torch.device) -> None:
    found: list[dict[str, Any]] = []
    simulation = gradcomp.Simulation(spec, {"a": (N - 100,), "b": (100,)}, WORLD, bucket_mb=0.001, device=device)
    telemetry.watch(simulation, found.append, every=1, compare=1)
    for step in range(3):
        grads = [grad.to(device) for grad in drawn(step)]
        update = simulation.step([{"a": grad[:-100], "b": grad[-100:]} for grad in grads])
        grads = [clipped(grad.cpu(), spec) for grad in grads]
        cosine, error = figures(torch.cat([update["a"], update["b"]]).cpu(), torch.stack(grads).mean(0))
        assert len(found) == WORLD * (step + 1)
        for record in found[-WORLD:]:
            assert record["cosine"] == pytest.approx(cosine, abs=1e-5)
            assert record["relative_error"] == pytest.approx(error, rel=1e-4, abs=1e-5)


def clipped(grad: Tensor, spec: str) -> Tensor:
    """The gradient of both layers as the spec clips them."""
    if "clip=" not in spec:
        return grad
    parts = grad.split([N - 100, 100])
    return torch.cat([part * min(1.0, 0.5 / math.sqrt(WORLD) / float(part.norm() + 1e-6)) for part in parts])


@pytest.mark.parametrize("knobs", ["", ":decay=0.5", ":momentum=0.9", ":momentum=0.9,nesterov=true,decay=0.5"])
@pytest.mark.parametrize("name", ["sign", "topk"])
def test_the_residual_is_no_part_of_it(name: str, knobs: str) -> None:
    """The addition is the gradient, or the whole effect that it has with a momentum, however much waits."""
    found: list[dict[str, Any]] = []
    simulation = gradcomp.Simulation(name + knobs, {"a": (N - 400,), "b": (400,)}, WORLD)
    telemetry.watch(simulation, found.append, every=1, compare=1)
    for step in range(4):
        grads = drawn(step)
        update = simulation.step([{"a": grad[:-400], "b": grad[-400:]} for grad in grads])
        effect = torch.stack(grads).mean(0) * (10 if "momentum" in knobs else 1)
        cosine, error = figures(torch.cat([*update.values()]), effect)
        assert found[-1]["cosine"] == pytest.approx(cosine, abs=1e-3)
        assert found[-1]["relative_error"] == pytest.approx(error, rel=1e-3)


def test_a_sample_of_a_large_bucket_tells_nearly_the_same() -> None:
    n = 400_000
    found: list[dict[str, Any]] = []
    simulation = gradcomp.Simulation("orq", {"w": (n,)}, 2)
    telemetry.watch(simulation, found.append, every=1, compare=1)
    grads = [gradients.draw("normal", n, rank) for rank in range(2)]
    cosine, error = figures(simulation.step([{"w": grad} for grad in grads])["w"], (grads[0] + grads[1]) / 2)
    assert found[0]["cosine"] == pytest.approx(cosine, abs=0.03)  # 1 % of the entries: about 1 / sqrt(4096), twice
    assert found[0]["relative_error"] == pytest.approx(error, rel=0.05)
