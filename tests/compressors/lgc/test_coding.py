"""Rows of entries at common places: whose decoder speaks of whom, and how many entries are learned from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradcomp.compressors.lgc import coding
from gradcomp.compressors.lgc.coding import CommonEntries, Innovations
from gradcomp.compressors.lgc.common_places import CommonPlaces
from gradcomp.core.requests import World


def rows_of(rank: int, ranks: int, count: int, k: int, first: int = 0, innovations: bool = False) -> CommonEntries:
    places = torch.arange(count * k).view(count, k)
    common = CommonPlaces(places, torch.ones(count, 1), [(first + row) % ranks for row in range(count)])
    return CommonEntries(
        torch.full((count, k), float(rank)),
        common,
        World(rank, ranks),
        Innovations(torch.zeros(ranks, count, k), []) if innovations else None,
    )


@pytest.mark.parametrize("ranks,count,first", [(4, 4, 0), (4, 4, 3), (5, 5, 2), (3, 1, 1), (1, 1, 0)])
def test_an_order_that_begins_at_the_leader_can_be_turned_back(ranks: int, count: int, first: int) -> None:
    everyone = torch.arange(float(ranks))[:, None, None].expand(ranks, count, 7)
    for rank in range(ranks):
        rows = rows_of(rank, ranks, count, 7, first)
        led = rows.in_leader_order(everyone)
        assert led[:, 0, 0].tolist() == rows.places.leaders
        assert sorted(led[0, :, 0].tolist()) == list(range(ranks))
        assert torch.equal(rows.select_own(led), rows.values)


@pytest.mark.parametrize("innovations", [False, True])
@pytest.mark.parametrize("ranks,count,k", [(4, 4, 400), (4, 1, 1000), (64, 64, 50), (2, 2, 5), (300, 1, 40)])
def test_no_more_is_learned_from_than_the_window_holds(ranks: int, count: int, k: int, innovations: bool) -> None:
    """Or from one row of as few entries as can be, where there are very many ranks."""
    seen: list[tuple[int, ...]] = []

    class Coder:
        def learn(self, loss_of: Any) -> None:
            loss_of(None)

        def encode(self, rows: torch.Tensor) -> torch.Tensor:
            return rows[:, None]

        def decode(self, codes: torch.Tensor, entries: int, innovations: torch.Tensor | None = None) -> torch.Tensor:
            return torch.zeros(len(codes), 1 if innovations is None else innovations.shape[1], entries)

        def loss_of_mean(self, rows: torch.Tensor, weights: None) -> None:
            seen.append(tuple(rows.shape))

        def loss_of_each(self, rows: torch.Tensor, innovations: torch.Tensor, weights: None) -> None:
            assert innovations.shape == rows.shape
            seen.append(tuple(rows.transpose(0, 1).shape))

    rows, window = rows_of(0, ranks, count, k, innovations=innovations), 4096
    for turn in range(20):
        has, misses = coding.learn(rows, torch.randn(ranks, count, k), Coder(), window, turn)  # type: ignore[arg-type]
        assert has.shape == misses.shape == seen[-1][1:]
    assert all(shape[0] == ranks for shape in seen)
    sizes = {shape[0] * shape[1] * shape[2] for shape in seen}
    assert len(sizes) == 1
    assert sizes.pop() <= max(window, ranks * coding.SHORTEST_WINDOW)
    if ranks * count * k <= window:
        assert seen[0] == (ranks, count, k)
