"""Models of unusual make: layouts, types, shapes and sharing that a gradient's way must not trip over."""

from __future__ import annotations

from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from odd_models import KEPT, MODELS, make, step
from torch import Tensor

pytestmark = pytest.mark.slow

STEPS = 4
SPECS = ("dense", "topk:ratio=1,wire=exact", "topk:ratio=0.05")


def by_hand(name: str) -> Tensor:
    """Train with plain hvd.allreduce of one gradient after the other, in float32, since Horovod takes no bfloat16."""
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for turn in range(STEPS):
        optimizer.zero_grad()
        step(model, turn, hvd.rank())
        for n, p in model.named_parameters():
            if p.grad is not None and p.numel():
                p.grad.copy_(hvd.allreduce(p.grad.float().contiguous(), name=f"by hand.{n}", op=hvd.Average))
        optimizer.step()
    return small_net.weights(model)


def through(name: str, door: str, spec: str) -> tuple[Tensor, list[str]]:
    """Train by a door; return the weights, and the parameters' types."""
    model = make(name)
    optimizer = doors.sgd(door, model, spec, lr=0.1, prefix=f"{name}/{door}/{spec}.")
    for turn in range(STEPS):
        optimizer.zero_grad()
        step(model, turn, hvd.rank())
        optimizer.step()
    return small_net.weights(model), [str(p.dtype) for p in model.parameters()]


def waiting(name: str, door: str) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Take one step; return every parameter's residual and gradient on this rank, and its update."""
    alone, model = make(name), make(name)
    step(alone, 0, hvd.rank())
    optimizer = doors.sgd(door, model, "topk:ratio=0.05", prefix="")
    step(model, 0, hvd.rank())
    optimizer.step()
    local, updated, kept = dict(alone.named_parameters()), dict(model.named_parameters()), optimizer.compression.residual()
    return {n: (kept[n], local[n].grad, updated[n].grad) for n in kept}  # type: ignore[misc]


def program() -> dict[Any, Any]:
    """Train every model by hand, then by both doors with every spec."""
    hvd.init()
    found: dict[Any, Any] = {}
    for name in MODELS:
        found[name] = by_hand(name)
        for door in doors.DOORS:
            for spec in SPECS:
                found[name, door, spec] = through(name, door, spec)
    for name in KEPT:
        for door in doors.DOORS:
            found["waiting", name, door] = waiting(name, door)
    model = make("bfloat16")
    found["stock bfloat16"] = small_net.refused(lambda: step(model, doors.sgd(doors.ALONE, model) and 0, 0))
    return found


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch(program, 2)


@pytest.mark.parametrize("door", doors.DOORS)
@pytest.mark.parametrize("spec", SPECS[:2])
@pytest.mark.parametrize("model", MODELS)
def test_with_nothing_left_out_training_is_the_one_by_hand(model: str, spec: str, door: str) -> None:
    """To the last bit: on two ranks a sum has one order, and half of it is exact."""
    for rank in found():
        ours, _ = rank[model, door, spec]
        assert ours.isfinite().all()
        assert torch.equal(ours, rank[model])


@pytest.mark.parametrize("door", doors.DOORS)
@pytest.mark.parametrize("model", MODELS)
def test_all_ranks_hold_the_same_weights_to_the_last_bit(model: str, door: str) -> None:
    (first, types), (second, _) = (rank[model, door, SPECS[2]] for rank in found())
    assert torch.equal(first, second)
    assert not torch.equal(first, found()[0][model, door, "dense"][0])  # something was left out indeed
    expected = {"bfloat16": {"torch.bfloat16"}, "float16": {"torch.float16"}}.get(model)
    assert expected is None or set(types) == expected


@pytest.mark.parametrize("door", doors.DOORS)
@pytest.mark.parametrize("model", KEPT)
def test_residual_and_update_add_up_to_the_gradients(model: str, door: str) -> None:
    """They have the parameters' shapes, in any layout, and the ranks' means add up."""
    first, second = (rank["waiting", model, door] for rank in found())
    assert any(kept.any() for kept, _, _ in first.values())
    for name, (kept, gradient, update) in first.items():
        assert kept.shape == gradient.shape == update.shape
        torch.testing.assert_close((kept + second[name][0]) / 2 + update, (gradient + second[name][1]) / 2)


def test_stock_horovod_takes_no_bfloat16() -> None:
    """The bfloat16 cases above cannot be trained without gradcomp."""
    for rank in found():
        assert rank["stock bfloat16"].startswith("ValueError: Tensor type torch.BFloat16Tensor is not supported")
