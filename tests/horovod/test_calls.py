"""The ways in which Horovod's users call the optimizer."""

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

EXACT, SPARSE = "topk:ratio=1,wire=exact", "topk:ratio=0.05"
count = itertools.count()


def optimizer(door: str, model: nn.Module, spec: str = SPARSE, **options: Any) -> Any:
    return doors.sgd(door, model, spec, **({"bucket_mb": 0.015, "prefix": f"{next(count)}."} | options))


def adversaries(door: str, spec: str) -> Tensor:
    """Train two adversarial nets in turn; the judge's parameters are frozen while the maker trains."""
    judge, maker = small_net.net(3), small_net.net(4)
    judging, making = optimizer(door, judge, spec), optimizer(door, maker, spec)
    data = doors.batches()
    for _ in range(8):
        x, y = next(data)
        judging.zero_grad()
        small_net.backward(judge, (torch.cat([x[:, :10], maker(x).detach()], 1), y))
        judging.step()
        making.zero_grad()
        judge.requires_grad_(False)
        small_net.backward(judge, (torch.cat([x[:, :10], maker(x)], 1), y))
        judge.requires_grad_(True)
        making.step()
    return torch.cat([small_net.weights(judge), small_net.weights(maker)])


def together(door: str, spec: str, left_out: int = 0) -> Tensor:
    """Train one model with two optimizers in one backward pass; rank 1 skips the second one's layers in step left_out."""
    model = small_net.net()
    of_part = [(name, p) for name, p in doors.named(model) if name.startswith("part")]
    of_rest = [(name, p) for name, p in doors.named(model) if not name.startswith("part")]
    number = next(count)
    both = [
        doors.wrapped(
            door, torch.optim.SGD([p for _, p in layers], 0.02), [(f"{number}.{name}", p) for name, p in layers], spec
        )
        for layers in (of_rest, of_part)
    ]
    data = doors.batches()
    for turn in range(6):
        for own in both:
            own.zero_grad()
        small_net.backward(model, next(data), skip=turn == left_out and hvd.rank() == 1)
        for own in both:
            own.step()
    return small_net.weights(model)


def together_later(door: str, spec: str) -> Tensor:
    return together(door, spec, left_out=2)


def clipped(door: str, spec: str) -> Tensor:
    model, data = small_net.net(), doors.batches()
    own = optimizer(door, model, spec)
    for _ in range(8):
        own.zero_grad()
        small_net.backward(model, next(data))
        own.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with own.skip_synchronize():
            own.step()
    return small_net.weights(model)


def with_closure(door: str, spec: str) -> Tensor:
    """Train with LBFGS, which asks for the gradient any number of times, but equally often on all ranks."""
    model, data = small_net.net(width=20), doors.batches()
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    own = doors.wrapped(door, lbfgs, doors.named(model, f"{next(count)}."), spec)
    for _ in range(3):
        batch = next(data)

        def closure(batch: Any = batch) -> Tensor:
            own.zero_grad()
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            own.synchronize()
            return hvd.allreduce(loss.detach(), name="loss")

        with own.skip_synchronize():
            own.step(closure)
    return small_net.weights(model)


def zeroed(door: str, spec: str) -> Tensor:
    """Train with three ways to clear gradients, in turn: the optimizer's zero_grad, None, and zeros."""
    model, data = small_net.net(), doors.batches()
    own = optimizer(door, model, spec)
    for turn in range(9):
        (own.zero_grad, model.zero_grad, lambda: model.zero_grad(set_to_none=False))[turn % 3]()
        small_net.backward(model, next(data), skip=turn in (4, 5))
        own.step()
    return small_net.weights(model)


def scaled(door: str, spec: str) -> Tensor:
    """Train with a GradScaler, used in the order of Horovod's documentation; no gradient overflows."""
    model, data = small_net.net(), doors.batches()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    own = optimizer(door, model, spec, scaler=scaler)
    for _ in range(8):
        own.zero_grad()
        x, y = next(data)
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        own.synchronize()
        scaler.unscale_(own)
        with own.skip_synchronize():
            scaler.step(own)
        scaler.update()
    return small_net.weights(model)


WAYS = {
    "adversaries": adversaries,
    "together": together,  # with carriers the ranks compare in the first backward pass, so they must meet in the same order
    "together later": together_later,
    "clipped": clipped,
    "closure": with_closure,
    "zeroed": zeroed,
    "scaled": scaled,
}
CASES = [(way, door) for way in WAYS for door in doors.DOORS if (way, door) != ("together", doors.COMPRESSION)]


def program() -> dict[Any, Any]:
    """Train in every way with Horovod alone, and by both doors with everything sent and with little."""
    hvd.init()
    found: dict[Any, Any] = {(way, doors.ALONE): train(doors.ALONE, "") for way, train in WAYS.items()}
    for way, door in CASES:
        for spec in (EXACT, SPARSE):
            found[way, door, spec] = WAYS[way](door, spec)
    return found


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch(program, 2)


@pytest.mark.parametrize("way, door", CASES)
def test_with_nothing_left_out_every_way_of_calling_is_horovods_own(way: str, door: str) -> None:
    for rank in found():
        assert torch.equal(rank[way, door, EXACT], rank[way, doors.ALONE])


@pytest.mark.parametrize("way, door", CASES)
def test_in_every_way_of_calling_all_ranks_hold_the_same_weights(way: str, door: str) -> None:
    first, second = (rank[way, door, SPARSE] for rank in found())
    assert first.isfinite().all()
    assert torch.equal(first, second)
