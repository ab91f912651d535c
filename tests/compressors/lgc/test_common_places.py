"""Leading ranks give all others the same places, in the same order, in few bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradcomp.compressors.lgc import common_places
from gradcomp.compressors.lgc.common_places import PlaceSelection
from gradcomp.core.requests import Gather, Send, World
from gradcomp.native.memory import Memory

CPU = torch.device("cpu")


def at(
    rank: int, world: int, n: int = 4000, ratio: float = 0.02, leader: str = "parts", step: int = 0, **options: Any
) -> PlaceSelection:
    options = {"bands": 16, "packed": True, "seed": 3} | options
    return PlaceSelection(n, World(rank, world), step, ratio=ratio, leader=leader, **options)


def chosen(of: PlaceSelection, value: torch.Tensor) -> torch.Tensor:
    return of.locate(of.choose(value, Memory())["places"], of.leaders.index(of.world.rank))


@pytest.mark.parametrize("world,n", [(1, 1000), (4, 4000), (4, 4001), (3, 3 * 64), (8, 8 * 64 + 7)])
def test_a_leader_chooses_the_largest_of_its_part(world: int, n: int) -> None:
    value, seen = torch.randn(n), torch.zeros(n)
    for rank in range(world):
        of = at(rank, world, n)
        found = chosen(of, value)
        row = of.leaders.index(rank)
        part = of.parts.places(row, torch.arange(of.parts.size))
        part = part[part < n]
        seen[part] += 1
        wanted = part[value[part].abs().topk(of.k).indices]
        assert sorted(found.tolist()) == sorted(wanted.tolist())
    assert torch.equal(seen, torch.ones(n))  # every entry is in one part


def test_together_they_choose_as_many_as_the_ratio_says() -> None:
    assert 4 * at(0, 4, 100_000, 0.01).k == 1000
    assert at(0, 4, 100_000, 0.01, "rotate").k == 1000


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


def test_more_bands_cost_as_many_bits_as_are_needed_to_say_which() -> None:
    def bits(bands: int) -> float:
        of = at(0, 4, 1_000_000, 0.001, bands=bands)
        return 8 * of.form()[1].length / of.k

    assert bits(16) == pytest.approx(bits(1) + 4, abs=0.3)
    assert bits(4000) <= 20 < 32


@pytest.mark.parametrize("world", [2, 4, 5])
def test_in_as_many_steps_as_there_are_ranks_each_leads_everywhere(world: int) -> None:
    for who, rows in (("parts", world), ("rotate", 1)):
        led = [at(0, world, leader=who, step=step).leaders for step in range(world)]
        assert all(len(leaders) == rows for leaders in led)
        for row in range(rows):
            assert sorted(leaders[row] for leaders in led) == list(range(world))


def test_a_drawn_leader_is_the_same_for_all_and_anyone() -> None:
    drawn = [{at(rank, 4, leader="seed", step=step).leaders[0] for rank in range(4)} for step in range(40)]
    assert all(len(leaders) == 1 for leaders in drawn)
    assert {leader for leaders in drawn for leader in leaders} == {0, 1, 2, 3}


def test_a_model_too_small_for_parts_has_one_leader() -> None:
    assert len(at(0, 4, 255).leaders) == 1
    assert len(at(0, 4, 256).leaders) == 4


@pytest.mark.parametrize("who", common_places.LEADERS)
def test_all_are_told_by_those_who_lead(who: str) -> None:
    """All ranks send as much where all lead; a single leader sends to all others, and they send nothing."""
    world, value = 4, torch.randn(4000)
    for rank in range(world):
        of = at(rank, world, leader=who, step=2)
        own = of.choose(value, Memory())
        assert bool(own) == (rank in of.leaders)
        request = next(of.share(own, of.form(), value.device))
        if who == "parts":
            assert isinstance(request, Gather)
        else:
            assert isinstance(request, Send)
            assert sorted(request.payloads) == ([r for r in range(world) if r != rank] if own else [])


@pytest.mark.parametrize("bands", [1, 16, 4000])
def test_plain_places_are_the_same_ones_in_the_same_order(bands: int) -> None:
    value = torch.randn(4000)
    packed, plain = (chosen(at(1, 4, bands=bands, packed=packed), value) for packed in (True, False))
    assert torch.equal(packed, plain)
    assert at(1, 4, packed=False).form()[1].dtype == torch.int32


@given(data=st.data(), n=st.integers(1, 2000), world=st.integers(1, 5))
def test_no_bytes_do_harm(data: st.DataObject, n: int, world: int) -> None:
    of = at(0, world, n, 0.1)
    size = of.form()[1].length
    packed = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    for row in range(len(of.leaders)):
        found = of.locate(packed, row)
        assert found.shape == (of.k,) and bool(((found >= 0) & (found < n)).all())
