"""DDP in the ways its users know, with models of unusual make; what is kept between steps; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from odd_models import KEPT, MODELS

pytestmark = pytest.mark.slow

ALONE, EXACT, SPARSE = None, "topk:ratio=1,wire=exact", "topk:ratio=0.05"
WAYS = ["ordinary", "views", "static", "unused_here", "accumulated", "clipped", "uneven"]


@ranks.once
def found(count: int) -> list[dict[Any, Any]]:
    return ranks.launch("ddp_ways", count)


@pytest.mark.parametrize("name", [*WAYS, *MODELS])
def test_with_nothing_left_out_every_way_is_ddps_own(name: str) -> None:
    """To the last bit: on two ranks a sum has one order, and half of it is exact."""
    for own in found(2):
        assert own[name, ALONE].isfinite().all()
        assert torch.equal(own[name, EXACT], own[name, ALONE])


@pytest.mark.parametrize("name, count", [*((name, 2) for name in [*WAYS, *MODELS]), *((name, 3) for name in WAYS)])
def test_in_every_way_all_ranks_hold_the_same_weights(name: str, count: int) -> None:
    first, *others = (own[name, SPARSE] for own in found(count))
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(first, found(count)[0][name, EXACT])  # something was left out indeed


@pytest.mark.parametrize("name", KEPT)
def test_what_waits_and_the_update_are_the_gradients(name: str) -> None:
    """In the parameters' shapes, whatever their layout: the ranks' means add up."""
    first, second = (own["waiting", name] for own in found(2))
    assert any(kept.any() for kept, _, _ in first.values())
    for n, (kept, gradient, update) in first.items():
        assert kept.shape == gradient.shape == update.shape
        assert torch.equal(update, second[n][2])
        torch.testing.assert_close((kept + second[n][0]) / 2 + update, (gradient + second[n][1]) / 2)


def test_within_a_group_its_members_train_together() -> None:
    first, _, second = found(3)
    assert torch.equal(first["some", EXACT], first["some", ALONE])
    assert torch.equal(first["some", SPARSE], second["some", SPARSE])


@pytest.mark.parametrize("spec", [SPARSE, "topk:ratio=0.05,momentum=0.9", "lgc:dense=2,learn=4,ratio=0.02", "dense"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_loaded_state_continues_to_the_last_bit(spec: str, count: int) -> None:
    for own in found(count):
        whole, resumed = own["resumed", spec]
        assert torch.equal(whole, resumed)


def test_the_spec_can_change_in_mid_training() -> None:
    for own in found(2):
        assert "spec: rank 0 has 'dense:feedback=true', rank 1 has 'sign'" in own["changed"]["refused"]
        assert own["changed"]["carried"]
        assert own["changed"]["spec"] == "sdagc:lam=2"
        assert torch.equal(own["changed"]["weights"], found(2)[0]["changed"]["weights"])


@pytest.mark.parametrize("count", [2, 3])
def test_of_a_layer_that_nobody_uses_what_was_left_still_comes(count: int) -> None:
    """DDP itself would drop it. Rounding: a sum of five float32 steps against one difference."""
    for own in found(count):
        came, expected = own["unused_everywhere"]
        assert came.abs().sum() > 0
        torch.testing.assert_close(came, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_an_overflow_on_one_rank_is_seen_by_all_and_not_kept(value: str) -> None:
    for own in found(3):
        case = own["overflow", value]
        assert case["skipped"] and case["kept finite"] and case["scale"] == 2
        assert torch.equal(case["weights"], found(3)[0]["overflow", value]["weights"])


def test_a_spec_that_is_another_on_one_rank_is_refused_on_all() -> None:
    for own in found(3):
        refused, weights = own["disagreement"]
        assert "spec: rank 0 has 'topk:ratio=0.05', rank 1 has 'topk:ratio=0.1'" in refused
        assert torch.equal(weights, found(3)[0]["disagreement"][1])


def test_what_cannot_be_is_said() -> None:
    for own in found(2):
        assert own["without_ddp"].startswith("TypeError: attach() got a Net; wrap the model in DistributedDataParallel")
        assert own["embedded"].startswith("ValueError: sparse gradients")
        assert "can only be called once" in own["twice"]
        assert "Pass optimizer= to have gradcomp check it" in own["unknown_momentum"]
        assert "would act twice" in own["unknown_momentum"]
