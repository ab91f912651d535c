"""auto under Horovod, by both doors: dense steps are Horovod's own, and whatever it takes, all ranks hold the same weights."""

from __future__ import annotations

from typing import Any

import choices
import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from torch import Tensor

pytestmark = pytest.mark.slow

TAKEN = (("stock",), ("stock", "half"), ("half", "topk"), ("sdagc", "stock"))
STEPS = 40


def trained(door: str, wanted: tuple[str, ...], **options: Any) -> tuple[Tensor, dict[str, Any]]:
    model = small_net.net()
    spec = None if door == doors.ALONE else "auto" if wanted == ("stock",) else "auto:loss=high"
    with choices.chosen(*wanted):
        optimizer = doors.sgd(door, model, spec, prefix=f"{door}/{wanted}/{options}.", **options)
        weights = small_net.train(model, optimizer, small_net.examples(hvd.rank()), STEPS)
    return weights, {} if spec is None else optimizer.compression.stats()


def two_at_once(door: str) -> tuple[Tensor, Tensor]:
    """Two models with a step each in turn, of which the second is behind by some steps."""
    models = [small_net.net(seed) for seed in (1, 2)]
    with choices.chosen("stock", "half"):
        optimizers = [doors.sgd(door, model, "auto", prefix=f"two {door} {i}.") for i, model in enumerate(models)]
        data = small_net.examples(hvd.rank())
        for step in range(STEPS):
            for model, optimizer in [*zip(models, optimizers, strict=True)][: 1 + (step > 3)]:
                small_net.train(model, optimizer, data, 1)
    return small_net.weights(models[0]), small_net.weights(models[1])


def in_bfloat16(door: str) -> tuple[Tensor, dict[str, Any]]:
    """Train a model in bfloat16, which Horovod cannot add up."""
    model = small_net.net().bfloat16()
    data = ((x.bfloat16(), y) for x, y in small_net.examples(hvd.rank()))
    with choices.chosen("stock", "half", "dense"):
        optimizer = doors.sgd(door, model, "auto", prefix=f"bfloat16 {door}.")
        return small_net.train(model, optimizer, data, STEPS), optimizer.compression.stats()


def restored(door: str) -> Tensor:
    """Go back to a commit in the middle of a stock step, as Horovod's elastic mode does after a failure."""
    model, data = small_net.net(), small_net.examples(hvd.rank())
    with choices.chosen("stock"):
        optimizer = doors.sgd(door, model, "auto", prefix=f"restored {door}.")
        small_net.train(model, optimizer, data, STEPS)
        if door != doors.ALONE:
            session = optimizer.compression._session
            session.commit()
            small_net.backward(model, next(data))
            session.roll_back()
            optimizer.load_state_dict(optimizer.state_dict())  # drops the handles of the step
        else:
            next(data)
        return small_net.train(model, optimizer, data, 3)


def program() -> dict[Any, Any]:
    hvd.init()
    found: dict[Any, Any] = {(door, wanted): trained(door, wanted) for door in doors.DOORS for wanted in TAKEN}
    for door in (doors.ALONE, *doors.DOORS):
        found[door] = trained(door, ("stock",))[0]
        found[door, "sum"] = trained(door, ("stock",), op=hvd.Sum, lr=0.01)[0]
        found[door, "momentum"] = trained(door, ("stock",), momentum=0.9)[0]
    for door in (doors.ALONE, *doors.DOORS):
        found["restored", door] = restored(door)
    for door in doors.DOORS:
        found["two", door] = two_at_once(door)
        found["bfloat16", door] = in_bfloat16(door)
    return found


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch(program, 2)


@pytest.mark.parametrize("door", doors.DOORS)
def test_stock_steps_are_horovods_own(door: str) -> None:
    """Means, sums, and with the optimizer's momentum, which nobody takes over."""
    for own in found():
        assert torch.equal(own[door], own[doors.ALONE])
        assert torch.equal(own[door, "momentum"], own[doors.ALONE, "momentum"])
        assert torch.equal(own[door, "sum"], own[doors.ALONE, "sum"])


@pytest.mark.parametrize("door", doors.DOORS)
@pytest.mark.parametrize("wanted", TAKEN)
def test_all_ranks_take_it_and_hold_the_same_weights(wanted: tuple[str, ...], door: str) -> None:
    (first, stats), (second, others) = (own[door, wanted] for own in found())
    assert torch.equal(first, second) and first.isfinite().all()
    assert stats["auto"]["way"] == others["auto"]["way"] == wanted[-1]
    assert stats["steps"] == STEPS
    assert stats["auto"]["seconds"] == others["auto"]["seconds"]


@pytest.mark.parametrize("door", doors.DOORS)
def test_after_a_failed_stock_step_no_result_of_it_is_left(door: str) -> None:
    for own in found():
        assert torch.equal(own["restored", door], own["restored", doors.ALONE])


@pytest.mark.parametrize("door", doors.DOORS)
def test_two_optimizers_take_their_turns_apart(door: str) -> None:
    first, second = (own["two", door] for own in found())
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("door", doors.DOORS)
def test_where_horovod_cannot_add_up_it_is_not_offered(door: str) -> None:
    for own in found():
        weights, stats = own["bfloat16", door]
        assert weights.isfinite().all() and torch.equal(weights, found()[0]["bfloat16", door][0])
        assert stats["auto"]["way"] == "dense" and {*stats["auto"]["seconds"]} == {"dense", "half"}
