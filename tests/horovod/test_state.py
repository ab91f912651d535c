"""State between steps: checkpoints, the optimizer's own state, and a step that overflowed."""

from __future__ import annotations

import itertools
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.slow

SPARSE, MOMENTUM = "topk:ratio=0.05", "topk:ratio=0.05,momentum=0.9"
both_doors = pytest.mark.parametrize("door", doors.DOORS)
count = itertools.count()


def optimizer(door: str, model: nn.Module, spec: str = SPARSE, **options: Any) -> Any:
    return doors.sgd(door, model, spec, **({"bucket_mb": 0.015, "prefix": f"{next(count)}."} | options))


def stock_state(door: str) -> dict[str, Any]:
    """The state_dict of an optimizer that keeps its momentum, before and after Horovod broadcasts it."""
    model = small_net.net()
    own = optimizer(door, model, f"{SPARSE},momentum=0", momentum=0.9)
    small_net.train(model, own, doors.batches(), 3)
    residual = own.compression.residual()
    before = own.state_dict()
    plain = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    hvd.broadcast_optimizer_state(own, 0)
    kept = own.compression.residual()
    return {
        "keys": {key for entry in before["state"].values() for key in entry},
        "groups": [sorted(group) for group in before["param_groups"]],
        "plain groups": [sorted(group) for group in plain.state_dict()["param_groups"]],
        "buffers": [entry["momentum_buffer"] for entry in own.state_dict()["state"].values()],
        "residual kept": all(torch.equal(kept[name], residual[name]) for name in residual),
        "residual": torch.cat([part.flatten() for part in residual.values()]),
        "weights": small_net.train(model, own, doors.batches(1), 3),
        "stats": own.compression.stats(),
    }


def fresh_broadcast(door: str) -> Tensor:
    """Broadcast parameters, and a state that does not exist yet, as scripts do at the start."""
    model = small_net.net(seed=5 + hvd.rank())
    own = optimizer(door, model, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(own, 0)
    return small_net.train(model, own, doors.batches(), 3)


def overflow(door: str, spec: str, value: float) -> dict[str, Any]:
    """Make one entry of rank 1 overflow in the fourth step, and skip that step as a GradScaler does."""
    model, data = small_net.net(), doors.batches()
    own = optimizer(door, model, spec)
    small_net.train(model, own, data, 3)
    spoiled = model.last.weight.register_hook(lambda g: g.index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(value)))
    if hvd.rank() != 1:
        spoiled.remove()
    own.zero_grad()
    small_net.backward(model, next(data))
    own.synchronize()
    spoiled.remove()
    finite = {name: bool(p.grad.isfinite().all()) for name, p in model.named_parameters() if p.grad is not None}
    state = own.compression.state_dict()["of_rank"][str(hvd.rank())]
    own._synchronized = False  # what an optimizer.step() that the scaler left out would have done
    kept = [
        *state["layers"].get("feedback", {}).get("residual", {}).values(),
        *state["layers"].get("sgd", {}).get("velocity", {}).values(),
    ]
    return {
        "finite": finite,
        "kept finite": all(bool(part.isfinite().all()) for part in kept),
        "weights": small_net.train(model, own, data, 3),
    }


def program() -> dict[Any, Any]:
    """Save, load, broadcast and overflow by both doors."""
    hvd.init()
    found: dict[Any, Any] = {}
    for door in doors.DOORS:
        found["state", door] = stock_state(door)
        found["fresh", door] = fresh_broadcast(door)
        for spec in (SPARSE, MOMENTUM, "dense"):
            for value in (float("inf"), float("nan")):
                found["overflow", door, spec, str(value)] = overflow(door, spec, value)
    return found


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch(program, 2)


@both_doors
def test_the_optimizers_own_state_is_the_stock_one(door: str) -> None:
    """Horovod broadcasts rank 0's to all: every rank's residual must not be in it, and stays what it was."""
    first, second = (rank["state", door] for rank in found())
    for own in (first, second):
        assert own["keys"] == {"momentum_buffer"}
        assert own["groups"] == own["plain groups"]
        assert own["residual kept"]
    assert all(torch.equal(a, b) for a, b in zip(first["buffers"], second["buffers"], strict=True))
    assert not torch.equal(first["residual"], second["residual"])
    assert torch.equal(first["weights"], second["weights"])


@both_doors
def test_a_broadcast_before_the_first_step_works(door: str) -> None:
    first, second = (rank["fresh", door] for rank in found())
    assert torch.equal(first, second)


@both_doors
def test_figures_of_the_last_step_are_there(door: str) -> None:
    for rank in found():
        stats = rank["state", door]["stats"]
        assert stats["steps"] == 6
        assert stats["bytes_dense"] == 4 * rank["state", door]["weights"].numel()
        assert stats["compression"] == stats["bytes_dense"] / stats["bytes_sent"]


@both_doors
@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("spec", [SPARSE, MOMENTUM, "dense"])
def test_an_overflow_on_one_rank_is_seen_by_all_and_not_kept(spec: str, value: str, door: str) -> None:
    """The bucket's gradients are not finite on any rank, so all skip the step; what is kept is finite; training goes on."""
    first, second = (rank["overflow", door, spec, value] for rank in found())
    assert first["finite"] == second["finite"]
    assert not (first["finite"]["last.weight"] and first["finite"]["last.bias"]), "the last layer shares the spoiled bucket"
    assert first["finite"]["first.weight"], "another bucket has nothing to do with it"
    for own in (first, second):
        assert own["kept finite"]
        assert own["weights"].isfinite().all()
    assert torch.equal(first["weights"], second["weights"])
