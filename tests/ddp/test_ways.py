"""DDP in the ways its users know: its own weights, or the same on all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_run import ALONE, EXACT, SPARSE, DdpRun
from torch import Tensor, nn

pytestmark = pytest.mark.slow


def ordinary(spec: str | None) -> Tensor:
    return DdpRun(spec).train(10)


def views(spec: str | None) -> Tensor:
    """Gradients are views of DDP's buckets."""
    return DdpRun(spec, gradient_as_bucket_view=True).train(10)


def static(spec: str | None) -> Tensor:
    return DdpRun(spec, static_graph=True).train(10)


def unused_here(spec: str | None) -> Tensor:
    """A layer that one rank leaves out, now and then."""
    return DdpRun(spec, find_unused_parameters=True).train(10, lambda step: step % 4 == 3 and dist.get_rank() == 0)


def accumulated(spec: str | None) -> Tensor:
    """Three backward passes a step, of which the last one exchanges."""
    run = DdpRun(spec)
    for _ in range(5):
        run.optimizer.zero_grad()
        for last in (False, False, True):
            with nullcontext() if last else run.whole.no_sync():
                run.backward()
        run.optimizer.step()
    return run.weights


def clipped(spec: str | None) -> Tensor:
    run = DdpRun(spec)
    for _ in range(8):
        run.optimizer.zero_grad()
        run.backward()
        nn.utils.clip_grad_norm_(run.plain.parameters(), 0.1)
        run.optimizer.step()
    return run.weights


def uneven(spec: str | None) -> Tensor:
    """One rank has more batches than the others: the others' part in it is zero."""
    run = DdpRun(spec)
    with run.whole.join():
        run.train(6 + 3 * (dist.get_rank() == 1))
    return run.weights


def some(spec: str | None) -> Tensor:
    """In a group of two of the ranks."""
    return torch.zeros(0) if dist.get_rank() == 1 else DdpRun(spec, process_group=dist.new_group([0, 2])).train(8)


WAYS = {way.__name__: way for way in (ordinary, views, static, unused_here, accumulated, clipped, uneven)}


def program() -> dict[Any, Any]:
    """Train in every way, with DDP alone, with everything sent and with little; three ranks train a group, too."""
    ranks.join()
    found: dict[Any, Any] = {}
    for name, way in {**WAYS, **({} if dist.get_world_size() == 2 else {"some": some})}.items():
        for spec in (ALONE, EXACT, SPARSE):
            found[name, spec] = way(spec)
    return found


@ranks.once
def found(count: int) -> list[dict[Any, Any]]:
    return ranks.launch(program, count)


@pytest.mark.parametrize("name", WAYS)
def test_with_nothing_left_out_every_way_is_ddps_own(name: str) -> None:
    """To the last bit: on two ranks a sum has one order, and half of it is exact."""
    for own in found(2):
        assert own[name, ALONE].isfinite().all()
        assert torch.equal(own[name, EXACT], own[name, ALONE])


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", WAYS)
def test_in_every_way_all_ranks_hold_the_same_weights(name: str, count: int) -> None:
    first, *others = (own[name, SPARSE] for own in found(count))
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(first, found(count)[0][name, EXACT])  # something was left out indeed


def test_within_a_group_its_members_train_together() -> None:
    first, _, second = found(3)
    assert torch.equal(first["some", EXACT], first["some", ALONE])
    assert torch.equal(first["some", SPARSE], second["some", SPARSE])
