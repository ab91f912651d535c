"""Common indices and the entries there: leaders, bits of an index, each rank's decoder, and the learning window."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradcomp.compressors.lgc import common_entries
from gradcomp.compressors.lgc.common_entries import CommonEntries, CommonIndices, IndexSelection, Innovations
from gradcomp.core.requests import Gather, Send, World
from gradcomp.messages import payload
from gradcomp.native.memory import Memory


def rows_of(rank: int, ranks: int, count: int, k: int, first: int = 0, innovations: bool = False) -> CommonEntries:
    indices = torch.arange(count * k).view(count, k)
    common = CommonIndices(indices, torch.ones(count, 1), [(first + row) % ranks for row in range(count)])
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
        assert led[:, 0, 0].tolist() == rows.common.leaders
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
        learning = common_entries.learn(rows, Coder(), window, turn)  # type: ignore[arg-type]
        next(learning)
        with pytest.raises(StopIteration) as end:
            learning.send([payload.wrap(torch.randn(count * k)) for _ in range(ranks)])
        _, has, misses = end.value.value
        assert has.shape == misses.shape == seen[-1][1:]
    assert all(shape[0] == ranks for shape in seen)
    sizes = {shape[0] * shape[1] * shape[2] for shape in seen}
    assert len(sizes) == 1
    assert sizes.pop() <= max(window, ranks * common_entries.SHORTEST_WINDOW)
    if ranks * count * k <= window:
        assert seen[0] == (ranks, count, k)


def at(rank: int, world: int, n: int = 4000, ratio: float = 0.02, step: int = 0, bands: int = 16) -> IndexSelection:
    return IndexSelection(n, World(rank, world), step, ratio, bands)


def chosen(of: IndexSelection, value: torch.Tensor) -> torch.Tensor:
    return of.locate(of.choose(value, Memory())["indices"], of.leaders.index(of.world.rank))


@pytest.mark.parametrize("world,n", [(1, 1000), (4, 4000), (4, 4001), (3, 3 * 64), (8, 8 * 64 + 7)])
def test_a_leader_chooses_the_largest_of_its_part(world: int, n: int) -> None:
    value, seen = torch.randn(n), torch.zeros(n)
    for rank in range(world):
        of = at(rank, world, n)
        found = chosen(of, value)
        row = of.leaders.index(rank)
        part = of.parts.indices(row, torch.arange(of.parts.size))
        part = part[part < n]
        seen[part] += 1
        wanted = part[value[part].abs().topk(of.k).indices]
        assert sorted(found.tolist()) == sorted(wanted.tolist())
    assert torch.equal(seen, torch.ones(n))  # every entry is in one part


def test_all_leaders_choose_the_ratio_of_all_entries() -> None:
    assert 4 * at(0, 4, 100_000, 0.01).k == 1000


@pytest.mark.parametrize("bands", [1, 7, 16, 4000])
def test_bands_are_in_the_order_of_their_values(bands: int) -> None:
    value = torch.randn(4000)
    of = at(1, 4, bands=bands)
    places = chosen(of, value)
    values = value[places]
    sizes = torch.bincount(torch.arange(of.k) * of.bands // of.k)
    pieces, where = values.split(sizes.tolist()), places.split(sizes.tolist())
    assert len(pieces) == min(bands, of.k)
    for low, high in itertools.pairwise(pieces):
        assert low.max() <= high.min()
    for piece in where:
        assert torch.equal(piece, piece.sort().values)


def test_more_bands_cost_the_bits_of_a_bands_number() -> None:
    def bits(bands: int) -> float:
        of = at(0, 4, 1_000_000, 0.001, bands=bands)
        return 8 * of.form()[1].length / of.k

    assert bits(16) == pytest.approx(bits(1) + 4, abs=0.3)
    assert bits(4000) <= 20 < 32


@pytest.mark.parametrize("world", [2, 4, 5])
def test_in_as_many_steps_as_there_are_ranks_each_leads_everywhere(world: int) -> None:
    for n, rows in ((4000, world), (100, 1)):
        led = [at(0, world, n, step=step).leaders for step in range(world)]
        assert all(len(leaders) == rows for leaders in led)
        for row in range(rows):
            assert sorted(leaders[row] for leaders in led) == list(range(world))


def test_a_model_too_small_for_parts_has_one_leader() -> None:
    assert len(at(0, 4, 255).leaders) == 1
    assert len(at(0, 4, 256).leaders) == 4


@pytest.mark.parametrize("n", [4000, 100])
def test_leaders_send_their_rows_to_all_ranks(n: int) -> None:
    """All ranks send as much where all lead; a single leader sends to all others, and they send nothing."""
    world, value = 4, torch.randn(n)
    for rank in range(world):
        of = at(rank, world, n, step=2)
        own = of.choose(value, Memory())
        assert bool(own) == (rank in of.leaders)
        request = next(of.share(own, of.form(), value.device))
        if n == 4000:
            assert isinstance(request, Gather)
        else:
            assert isinstance(request, Send)
            assert sorted(request.payloads) == ([r for r in range(world) if r != rank] if own else [])


@given(data=st.data(), n=st.integers(1, 2000), world=st.integers(1, 5))
def test_no_bytes_do_harm(data: st.DataObject, n: int, world: int) -> None:
    of = at(0, world, n, 0.1)
    size = of.form()[1].length
    packed = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    for row in range(len(of.leaders)):
        found = of.locate(packed, row)
        assert found.shape == (of.k,) and bool(((found >= 0) & (found < n)).all())
