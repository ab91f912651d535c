"""A layer that is frozen in mid-training, through every door: nothing moves it, and its residual stays."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import doors
import pytest
import ranks
import small_net
import torch
from doors import DDP, EVERY, OWN, Training
from torch import nn
from torch.optim import SGD, AdamW

pytestmark = pytest.mark.slow

SPEC, BUCKET_MB = "topk:ratio=0.05", 0.02
# The steps before which the layer is frozen, and unfrozen again.
FROZEN, UNFROZEN, STEPS = 3, 6, 8
OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(SGD, lr=0.02),
    "momentum": partial(SGD, lr=0.02, momentum=0.9),
    "AdamW": partial(AdamW, lr=1e-3, weight_decay=0.0),
}
# Specs that round the zeros of a frozen layer to something, since its entries share groups with others.
ROUNDING = ("sign", "sign:route=alltoall", "bingrad", "linear", "orq:levels=9,feedback=true")
# Horovod itself gives frozen layers zeros as gradients, by which these move them.
FOR_DDP: dict[str, Any] = {
    "decay": partial(AdamW, lr=1e-2),
    "decay in the gradient": partial(SGD, lr=0.02, momentum=0.9, weight_decay=0.01),
    "outside": partial(SGD, lr=0.02, momentum=0.9),
}
CASES = [*((door, each) for door in EVERY for each in OPTIMIZERS), *((DDP, each) for each in FOR_DDP)]


def made(door: str, model: nn.Module, optimizer: Any, spec: str = SPEC) -> Training:
    ddp = {"find_unused_parameters": True} if door == DDP else {}
    return Training(door, model, spec, prefix="", inner=optimizer, bucket_mb=BUCKET_MB, **ddp)


def train(door: str, optimizer: str, by: tuple[int, ...], spec: str) -> dict[str, Any]:
    """Train; the ranks `by` freeze a layer and unfreeze it again.

    Return how far it moved, its residuals and the weights.
    """
    model = small_net.net()
    inner = (OPTIMIZERS | FOR_DDP)[optimizer](model.parameters())
    run = made(door, model, inner, f"{spec},momentum=0" if optimizer == "outside" else spec)
    moved, kept = [], []
    for step in range(STEPS):
        if step in (FROZEN, UNFROZEN) and doors.rank(door) in by:
            model.part.requires_grad_(step == UNFROZEN)
        before = model.part.weight.detach().clone()
        run.train(1)
        moved.append(float((model.part.weight.detach() - before).abs().sum()))
        kept.append(run.residual()["part.weight"])
    return {"moved": moved, "waits": kept, "weights": run.weights}


def train_all(door: str, optimizer: str, by: tuple[int, ...], of_specs: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    doors.join(door)
    return {spec: train(door, optimizer, by, spec) for spec in of_specs}


@ranks.once
def trained(door: str, optimizer: str, by: tuple[int, ...], of_specs: tuple[str, ...] = (SPEC,)) -> list[dict[str, Any]]:
    return ranks.launch(train_all, 2, door, optimizer, by, of_specs)


@pytest.mark.parametrize("door,optimizer", CASES)
def test_nothing_moves_a_layer_that_all_ranks_have_frozen(door: str, optimizer: str) -> None:
    check([own[SPEC] for own in trained(door, optimizer, (0, 1))])


@pytest.mark.parametrize("door", [DDP, OWN])
def test_nothing_moves_it_where_its_zeros_are_rounded(door: str) -> None:
    found = trained(door, "SGD", (0, 1), ROUNDING)
    for spec in ROUNDING:
        check([own[spec] for own in found], has_residual=spec not in ("bingrad", "linear"))


def check(found: list[dict[str, Any]], has_residual: bool = True) -> None:
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    for own in found:
        assert not any(own["moved"][FROZEN:UNFROZEN]) and all(own["moved"][:FROZEN] + own["moved"][UNFROZEN:])
        assert own["waits"][FROZEN - 1].any() == has_residual
        assert all(torch.equal(own["waits"][FROZEN - 1], each) for each in own["waits"][FROZEN:UNFROZEN])


@pytest.mark.parametrize("door", EVERY)
def test_the_other_ranks_move_a_layer_that_one_rank_has_frozen_as_without_gradcomp(door: str) -> None:
    """Stock DDP and Horovod average the others' gradients with its zeros, on all ranks alike."""
    found = [own[SPEC] for own in trained(door, "SGD", (1,))]
    assert torch.equal(found[0]["weights"], found[1]["weights"]) and all(found[1]["moved"])
    kept = found[1]["waits"]
    assert all(torch.equal(kept[FROZEN - 1], each) for each in kept[FROZEN:UNFROZEN])


def test_replicas_stay_equal_if_one_rank_has_frozen_a_layer_and_its_zeros_are_rounded() -> None:
    there, here = trained(OWN, "SGD", (1,), ROUNDING)
    for spec in ROUNDING:
        assert torch.equal(there[spec]["weights"], here[spec]["weights"]) and all(here[spec]["moved"])


def unfreeze(door: str) -> str:
    """Unfreeze a layer on rank 1 alone that was frozen when the exchange was set up. Return the error."""
    doors.join(door)
    model = small_net.net()
    model.part.requires_grad_(False)
    run = made(door, model, OPTIMIZERS["SGD"](model.parameters()))
    run.train(2)
    before = run.weights
    model.part.requires_grad_(doors.rank(door) == 1)
    said = small_net.refused(lambda: run.train(2))
    if doors.rank(door) == 1:
        assert torch.equal(run.weights, before), "a step that is refused moves no weights"
    ranks.report(said)
    os._exit(0)


@pytest.mark.parametrize("door", [DDP, OWN])
def test_a_layer_that_one_rank_unfreezes_too_late_is_refused(door: str) -> None:
    """Its gradient stays on the rank: by stock DDP and Horovod, too, which say nothing."""
    there, here = ranks.launch(unfreeze, 2, door)
    assert here.startswith("RuntimeError: 'part.weight' of shape (70, 70) was frozen when gradcomp was set up")
    assert "gradcomp's exchange failed" in there and "a rank ended or raised an error (see its output)" in there


def add(door: str) -> dict[str, Any]:
    """Add a layer's parameters to the optimizer after two steps. Return the weights of before and after, and what was said."""
    doors.join(door)
    model = small_net.net()
    run = made(door, model, SGD([each for name, each in model.named_parameters() if "part" not in name], lr=0.02))
    run.train(2)
    before = model.part.weight.detach().clone()
    run.optimizer.add_param_group({"params": [*model.part.parameters()], "lr": 0.02})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.train(4)
    return {"before": before, "after": model.part.weight.detach(), "said": [str(each.message) for each in said]}


@pytest.mark.parametrize("door", EVERY)
def test_layers_that_an_optimizer_gets_later_are_exchanged_or_warned_of(door: str) -> None:
    """Horovod's own optimizer exchanges those of its set-up alone, and says nothing."""
    there, here = ranks.launch(add, 2, door)
    assert torch.equal(there["before"], here["before"]) and not torch.equal(here["before"], here["after"])
    if torch.equal(there["after"], here["after"]):
        assert not there["said"] and door != OWN
    else:
        assert len(there["said"]) == 1 and "SGD got a parameter of shape (70, 70)" in there["said"][0]
