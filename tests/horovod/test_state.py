"""What is kept between steps, and the ways of calling the optimizer that Horovod's users know."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch

pytestmark = pytest.mark.slow

EXACT, SPARSE, MOMENTUM = "topk:ratio=1,wire=exact", "topk:ratio=0.05", "topk:ratio=0.05,momentum=0.9"
WAYS = [
    (way, route)
    for way in ("adversaries", "together", "together later", "clipped", "closure", "zeroed", "scaled")
    for route in ("A", "B")
    if (way, route) != ("together", "A")
]
both_routes = pytest.mark.parametrize("route", ["A", "B"])


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch("horovod_state", 2)


@pytest.mark.parametrize("way, route", WAYS)
def test_with_nothing_left_out_every_way_of_calling_is_horovods_own(way: str, route: str) -> None:
    for rank in found():
        assert torch.equal(rank[way, route, EXACT], rank[way, "hvd"])


@pytest.mark.parametrize("way, route", WAYS)
def test_in_every_way_of_calling_all_ranks_hold_the_same_weights(way: str, route: str) -> None:
    first, second = (rank[way, route, SPARSE] for rank in found())
    assert first.isfinite().all()
    assert torch.equal(first, second)


@both_routes
@pytest.mark.parametrize("spec", [SPARSE, MOMENTUM, "dense"])
def test_a_loaded_state_continues_to_the_last_bit(spec: str, route: str) -> None:
    """20 steps are 10 steps, saved, loaded into new objects, and 10 more."""
    for rank in found():
        whole, resumed = rank["resumed", route, spec]
        assert torch.equal(whole, resumed)


@both_routes
def test_the_optimizers_own_state_is_the_stock_one(route: str) -> None:
    """Horovod broadcasts rank 0's to all: every rank's residual must not be in it, and stays what it was."""
    first, second = (rank["state", route] for rank in found())
    for own in (first, second):
        assert own["keys"] == {"momentum_buffer"}
        assert own["groups"] == own["plain groups"]
        assert own["residual kept"]
    assert all(torch.equal(a, b) for a, b in zip(first["buffers"], second["buffers"], strict=True))
    assert not torch.equal(first["residual"], second["residual"])
    assert torch.equal(first["weights"], second["weights"])


@both_routes
def test_a_broadcast_before_the_first_step_works(route: str) -> None:
    first, second = (rank["fresh", route] for rank in found())
    assert torch.equal(first, second)


@both_routes
def test_figures_of_the_last_step_are_there(route: str) -> None:
    for rank in found():
        stats = rank["state", route]["stats"]
        assert stats["steps"] == 6
        assert stats["bytes_dense"] == 4 * rank["state", route]["weights"].numel()
        assert stats["compression"] == stats["bytes_dense"] / stats["bytes_sent"]


@both_routes
@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("spec", [SPARSE, MOMENTUM, "dense"])
def test_an_overflow_on_one_rank_is_seen_by_all_and_not_kept(spec: str, value: str, route: str) -> None:
    """The bucket's gradients are not finite on any rank, so all skip the step; what is kept is finite; training goes on."""
    first, second = (rank["overflow", route, spec, value] for rank in found())
    assert first["finite"] == second["finite"]
    assert not (first["finite"]["last.weight"] and first["finite"]["last.bias"]), "the last layer shares the spoiled bucket"
    assert first["finite"]["first.weight"], "another bucket has nothing to do with it"
    for own in (first, second):
        assert own["kept finite"]
        assert own["weights"].isfinite().all()
    assert torch.equal(first["weights"], second["weights"])
