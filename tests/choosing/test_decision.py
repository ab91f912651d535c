"""The decision: a way that loses more must be faster by more than 3 %, and one that loses less no slower than by 1 %."""

from __future__ import annotations

import pytest
import torch

from gradcomp.choosing.decision import TRIED, best_of, shortlist
from gradcomp.choosing.ways import STOCK, Way

HALF, LEVELS, SPARSE, OTHER = Way("half"), Way("orq:levels=5"), Way("topk"), Way("dense")
CAST = Way("dense", torch.bfloat16)
EVERY = [STOCK, HALF, LEVELS, SPARSE]


@pytest.mark.parametrize(
    ("seconds", "present", "wanted"),
    [
        ((1.0, 0.98, 0.98, 0.98), STOCK, STOCK),
        ((1.0, 0.96, 0.95, 0.94), OTHER, HALF),
        ((1.0, 0.96, 0.92, 0.94), OTHER, LEVELS),
        ((1.0, 2.0, 3.0, 0.1), OTHER, SPARSE),
        ((1.0, 0.98, 2.0, 2.0), HALF, HALF),
        ((0.97, 0.98, 2.0, 2.0), HALF, STOCK),
        ((0.985, 0.98, 2.0, 2.0), HALF, STOCK),
        ((1.0, 2.0, 0.995, 2.0), LEVELS, STOCK),
        ((1.0, 0.98, 0.96, 0.955), HALF, HALF),
        ((1.0, 0.98, 0.94, 0.93), HALF, LEVELS),
    ],
)
def test_the_gentlest_of_what_is_about_as_fast(seconds: tuple[float, ...], present: Way, wanted: Way) -> None:
    best, reason = best_of(EVERY, dict(zip(EVERY, seconds, strict=True)), present)
    assert best == wanted
    assert f"takes {1e3 * seconds[EVERY.index(best)]:.3g} ms" in reason
    assert all(str(way) in reason for way in EVERY if way != best)


def test_what_was_not_tried_is_not_chosen() -> None:
    assert best_of(EVERY, {STOCK: 1.0, LEVELS: 0.5}, OTHER)[0] == LEVELS
    assert best_of(EVERY, {STOCK: 1.0}, OTHER) == (STOCK, "a step takes 1e+03 ms")
    assert best_of(EVERY, {}, OTHER) == (OTHER, "no other way suits the training now")


def test_stock_and_the_present_way_are_tried_whatever_their_forecast() -> None:
    forecast = {STOCK: 9.0, HALF: 5.0, LEVELS: 1.2, SPARSE: 1.0}
    assert shortlist(EVERY, forecast, HALF) == [STOCK, HALF, LEVELS, SPARSE]
    assert shortlist(EVERY, forecast, STOCK) == [STOCK, LEVELS, SPARSE]
    assert shortlist([STOCK, CAST, *EVERY[1:]], forecast | {CAST: 8.0}, STOCK) == [STOCK, CAST, LEVELS, SPARSE]


def test_only_some_are_tried() -> None:
    many = [STOCK, *(Way(f"topk:ratio=0.0{i}") for i in range(1, 10))]
    assert len(shortlist(many, dict.fromkeys(many, 1.0), STOCK)) == TRIED
