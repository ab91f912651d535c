"""Entries that have waited: something was left of them. An entry that nothing came for keeps the optimizer's momentum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import gradcomp

STEPS, LATE = 12, 5
SPECS = [
    "topk:ratio=0.5,wire=exact",
    "topk:ratio=0.5,wire=exact,route=split",
    "topk:ratio=0.5,wire=exact,route=tree",
    "topk:ratio=1,wire=exact,by_host=true",
    "sdagc:lam=0.5,wire=exact,cap=1",
]
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (SGD, {"momentum": 0.9}),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True}),
    "adamw": (AdamW, {}),
}


def gradient(step: int) -> Tensor:
    """The first rows have a gradient in each step, and the last ones in one step alone, as rows of an embedding have."""
    grad = torch.zeros(64, 64)
    grad[:16] = 1 + torch.rand(16, 64, generator=torch.Generator().manual_seed(step))
    if step == LATE:
        grad[48:] = 2.0
    return grad


@pytest.mark.parametrize("case", OPTIMIZERS)
@pytest.mark.parametrize("spec", SPECS)
def test_an_entry_that_nothing_came_for_has_not_waited(spec: str, case: str) -> None:
    kind, settings = OPTIMIZERS[case]
    ours, theirs = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    optimizer, plain = (kind([each], lr=0.1, **settings) for each in (ours, theirs))
    options: dict[str, Any] = {"optimizer": optimizer, "named_parameters": [("x", ours)], "ranks_per_host": 2}
    simulation = gradcomp.Simulation(spec, {"x": (64, 64)}, 4, **options)
    for step in range(STEPS):
        theirs.grad = gradient(step)
        ours.grad = simulation.step([{"x": gradient(step)}] * 4)["x"].clone()
        optimizer.step()
        plain.step()
        assert not simulation.residual(0)["x"].any(), "all is sent"
    assert theirs[48:].abs().min() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", ["topk:ratio=0.5,wire=exact", "topk:ratio=0.5,wire=exact,by_host=true"])
def test_an_entry_that_waited_has_no_momentum_on_any_rank(spec: str) -> None:
    """With by_host, what waits lies on one rank of a host, and velocities on all."""
    weight = nn.Parameter(torch.zeros(64))
    optimizer = SGD([weight], lr=0.1, momentum=0.5)
    options: dict[str, Any] = {"optimizer": optimizer, "named_parameters": [("x", weight)], "ranks_per_host": 2}
    simulation = gradcomp.Simulation(spec, {"x": (64,)}, 4, **options)
    large = torch.arange(64) % 2 == 0
    simulation.step([{"x": torch.where(large, 8.0, 1.0)}] * 4)
    sent = simulation.step([{"x": torch.where(large, -4.0, 0.0)}] * 4)["x"]  # the large velocities become 0
    assert torch.equal(sent, torch.where(large, 0.0, 1.5))
    for share in simulation.state_dict()["of_rank"].values():
        assert not share["layers"]["sgd"]["velocity"]["x"].any()
