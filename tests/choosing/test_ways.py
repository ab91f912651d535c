"""The ways among which auto chooses: each loss allows what the smaller ones do, and what needs an optimizer waits for one."""

from __future__ import annotations

import itertools

import pytest
import torch

import gradcomp
from gradcomp.auto import LOSSES
from gradcomp.choosing.ways import STOCK, Way, ways
from gradcomp.prediction import peers

TYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_way_can_be_made_and_forecast(loss: str) -> None:
    for way in ways(loss, TYPES, True, True):
        assert str(gradcomp.make(way.spec)) == way.spec  # or a way would not be known again after a load
        assert way.stock is None or peers.is_peer(way.tried_as)


def test_a_larger_loss_adds_ways_that_lose_more() -> None:
    by_loss = [ways(loss, TYPES, True, True) for loss in LOSSES]
    for less, more in itertools.pairwise(by_loss):
        assert more[: len(less)] == less and len(more) > len(less)


def test_none_only_rounds_to_16_bits() -> None:
    assert [str(way) for way in ways("none", TYPES, True, True)] == ["stock", "stock in bf16", "half"]
    assert [str(way) for way in ways("none", (torch.float32,), False, False)] == ["stock", "half"]
    assert [str(way) for way in ways("none", (), False, False)] == ["dense", "half"]  # Horovod cannot add up bfloat16


def test_what_waits_comes_last_and_only_beside_a_known_optimizer() -> None:
    """A gradient that waits must meet the momentum of its own step, which only a known optimizer shows."""
    for several in (False, True):
        known = ways("high", TYPES, several, True)
        assert any(way.keeps for way in known)
        assert sorted(known, key=lambda way: way.keeps) == known
        assert [way for way in known if not way.keeps] == ways("high", TYPES, several, False)


def test_hosts_of_several_ranks_add_ways_between_hosts() -> None:
    only = {str(way) for way in ways("high", TYPES, True, True)} - {str(way) for way in ways("high", TYPES, False, True)}
    assert only and all("by_host=true" in spec for spec in only)


def test_a_way_between_hosts_comes_before_the_same_one_between_ranks() -> None:
    """It loses less: ranks of a host add their gradients up before they round. Five levels lose more than nine all the same."""
    rounded = [way.spec for way in ways("low", (torch.float32,), True, False)][2:]
    nine, five = "orq:levels=9,momentum=0", "orq:levels=5,momentum=0"
    assert [spec.replace(",by_host=true", "") for spec in rounded] == [nine, nine, five, five]
    assert ["by_host" in spec for spec in rounded] == [True, False, True, False]


def test_stock_is_always_there_and_first() -> None:
    assert all(ways(loss, TYPES, several, known)[0] == STOCK for loss in LOSSES for several in (0, 1) for known in (0, 1))
    assert not STOCK.keeps and Way("topk").keeps
