"""Layers that no rank has moved under local steps stay where they are; and steps that LocalSteps does not take."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import join, launch, once
from torch import Tensor, nn

import gradcomp

EVERY = 4
# Quantizers without a level at 0, with a residual and without, and what sends all.
SPECS = ["dense", "sign", "linear", "topk:ratio=0.1"]


def trained(spec: str, fragments: int, rank: int) -> dict[str, Any]:
    """Train three layers of which one is unused; freeze one, and unfreeze it."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
    local = gradcomp.local.LocalSteps(
        model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), spec, every=EVERY, fragments=fragments
    )

    def train(steps: range) -> list[Tensor]:
        for step in steps:
            local.zero_grad()
            x = torch.randn(8, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            (model[1](model[0](x).tanh()) - rank).square().mean().backward()
            local.step()
        local.flush()
        return [each.detach().clone() for each in model.parameters()]

    begun = [each.detach().clone() for each in model.parameters()]
    found = {"unused": torch.equal(train(range(12))[4], begun[4])}
    model[1].requires_grad_(False)
    frozen = model[1].weight.detach().clone()
    rested = train(range(20, 44))
    found["frozen"] = torch.equal(rested[2], frozen)
    model[1].requires_grad_(True)
    found["unfrozen"] = not torch.equal(train(range(50, 62))[2], frozen)
    return found | {"weights": train(range(70, 73))}


def missed(rank: int, act: Callable[[Any, Any], object]) -> tuple[Tensor, list[str], int]:
    """Train for two rounds by another call than local.step(), and flush()."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    earlier = gradcomp.local.LocalSteps(model, optimizer, "dense", every=EVERY)
    local = gradcomp.local.LocalSteps(model, optimizer, "dense", every=EVERY)
    copy.deepcopy(optimizer).step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2 * EVERY):
            optimizer.zero_grad()
            model(torch.ones(3, 4) + rank).square().mean().backward()
            act(local, optimizer)
        local.flush()
    assert earlier.stats()["steps"] == 0
    return model.weight.detach().clone(), [str(each.message) for each in caught], local.stats()["synchronizations"]


def by_scaler(local: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)


def with_one_between(local: Any, optimizer: Any) -> None:
    optimizer.step()
    local.step(lambda: 0.0)


def on_ranks() -> dict[str, Any]:
    join()
    rank = dist.get_rank()
    found: dict[str, Any] = {f"{spec} {fragments}": trained(spec, fragments, rank) for spec in SPECS for fragments in (1, 2)}
    found["inner"] = missed(rank, lambda local, optimizer: optimizer.step())
    found["scaler"] = missed(rank, by_scaler)
    found["both"] = missed(rank, with_one_between)
    return found


@once
def launched() -> list[dict[str, Any]]:
    return launch(on_ranks, 2)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("spec", SPECS)
def test_a_layer_that_no_rank_moves_stays(spec: str, fragments: int) -> None:
    first, second = (rank[f"{spec} {fragments}"] for rank in launched())
    for found in (first, second):
        assert found["unused"] and found["frozen"] and found["unfrozen"]
    assert all(map(torch.equal, first["weights"], second["weights"]))


@pytest.mark.parametrize("way", ["inner", "scaler"])
def test_steps_outside_local_steps_are_warned_of_and_flush_makes_ranks_equal(way: str) -> None:
    (first, said, synchronizations), (second, _, _) = (rank[way] for rank in launched())
    assert torch.equal(first, second) and synchronizations == 1
    assert len(said) == 1 and "SGD has taken 3 steps outside LocalSteps" in said[0]


def test_single_steps_outside_are_no_fault() -> None:
    (first, said, synchronizations), (second, _, _) = (rank["both"] for rank in launched())
    assert torch.equal(first, second) and said == [] and synchronizations == 2
