"""Routes of sparse entries whose traffic does not grow with the ranks: the parts of a bucket, and the sums that are sent on."""

from __future__ import annotations

import math

import gradients
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradcomp
from gradcomp.exchanges.split import Partition
from gradcomp.native.memory import Memory

WORLDS = [2, 3, 4, 7, 8]
SPLIT, TREE = "topk:ratio=0.01,route=split", "topk:ratio=0.01,route=tree"


@given(n=st.integers(1, 20_000), ranks=st.integers(1, 9), seed=gradients.seeds)
def test_every_entry_is_in_one_place_of_one_part(n: int, ranks: int, seed: int) -> None:
    parts = Partition(n, ranks)
    owners, local = parts.locate(torch.arange(n))
    assert len(set(zip(owners.tolist(), local.tolist(), strict=True))) == n
    for rank in range(ranks):
        own = (owners == rank).nonzero().flatten()
        assert (local[own] < parts.size).all()
        assert torch.equal(parts.indices(rank, local[own]), own)
        part = torch.zeros(parts.size)
        part[local[own]] = own + 1.0
        assert torch.equal(parts.copy(rank, torch.arange(1.0, n + 1), Memory()), part)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("hot", ["column", "row", "layer", "blocks"])
def test_parts_are_about_equally_full_for_any_place_of_the_large_entries(ranks: int, hot: str) -> None:
    matrix = torch.zeros(2048, 2048)
    if hot == "column":
        matrix[:, 7] = 1
    elif hot == "row":
        matrix[5:9] = 1
    elif hot == "layer":
        matrix[100:110, :1024] = 1
    else:
        matrix[::16, 64:128] = 1
    owners, _ = Partition(matrix.numel(), ranks).locate(matrix.flatten().nonzero().flatten())
    counts = torch.bincount(owners, minlength=ranks)
    assert counts.max() <= 1.35 * counts.float().mean() + 4


@pytest.mark.parametrize("spec", [SPLIT, SPLIT + ",wire=exact", TREE])
@pytest.mark.parametrize("world", WORLDS)
def test_an_entry_that_is_large_on_all_ranks_arrives_as_its_mean(spec: str, world: int) -> None:
    n = 5000
    places = torch.arange(40, n, 125)
    grads = [0.001 * torch.randn(n) for _ in range(world)]
    for rank, grad in enumerate(grads):
        grad[places] = torch.arange(1.0, 41) + 64 * (rank + 1)  # which halves can tell
    update = gradcomp.Simulation(spec, {"w": (n,)}, world).step([{"w": grad} for grad in grads])["w"]
    mean = torch.stack(grads).mean(0)
    # An entry and its sum are rounded to powers of two; the rounding errors stay.
    torch.testing.assert_close(update[places], mean[places], rtol=7 / 9 if spec == SPLIT else 1e-6, atol=0)


@pytest.mark.parametrize("world", WORLDS)
def test_split_sends_the_largest_sums_of_each_part_on(world: int) -> None:
    n, k = 6400, 64
    torch.manual_seed(world)
    grads = [torch.randn(n) for _ in range(world)]
    simulation = gradcomp.Simulation(SPLIT + ",wire=exact", {"w": (n,)}, world)
    update = simulation.step([{"w": grad} for grad in grads])["w"]
    sums = torch.zeros(n)
    for grad in grads:
        top = grad.abs().topk(k).indices
        sums[top] += grad[top]
    parts = Partition(n, world)
    owners, _ = parts.locate(torch.arange(n))
    for rank in range(world):
        own = sums.masked_fill(owners != rank, 0.0)
        wanted = own.abs().topk(min(parts.part_capacity(k), int((own != 0).sum()))).indices
        torch.testing.assert_close(update[wanted], own[wanted] / world)
        assert (update[owners == rank] != 0).sum() == len(wanted)


@pytest.mark.parametrize("route,least,most", [("split", 2.2, 2.6), ("tree", 4, 5), ("allgather", 15, 15)])
def test_traffic_of_sixteen_ranks(route: str, least: float, most: float) -> None:
    """Bytes that leave the busiest rank, over those of a payload (compact; in a tree exact). A gather goes round in a ring."""
    n, world = 1 << 20, 16
    simulation = gradcomp.Simulation(f"topk:ratio=0.01,route={route}", {"w": (n,)}, world)
    simulation.step([{"w": torch.randn(n)} for _ in range(world)])
    k = math.ceil(0.01 * n)
    payload = 8 * k if route == "tree" else 4 * sum(reference.row_words(n, k))
    sent = max(simulation.bytes_sent) * {"tree": 1, "split": 2 * (world - 1) / world, "allgather": world - 1}[route]
    assert least <= sent / payload <= most * 1.05


def test_ties_and_vanishing_sums_are_settled_alike() -> None:
    """Ranks that cancel one another, everywhere equal magnitudes: nothing is lost, and all ranks agree (step() checks)."""
    for route in ("split", "tree"):
        simulation = gradcomp.Simulation(f"topk:ratio=0.05,route={route}", {"w": (1000,)}, 2)
        for _ in range(3):
            update = simulation.step([{"w": torch.ones(1000)}, {"w": -torch.ones(1000)}])["w"]
            assert not update.any()
        left = simulation.residual(0)["w"] + simulation.residual(1)["w"]
        assert not left.any()


@pytest.mark.parametrize("route", ["split", "tree"])
def test_a_warm_up_sends_more_at_first(route: str) -> None:
    simulation = gradcomp.Simulation(f"topk:ratio=0.01,route={route},warmup=5", {"w": (1000,)}, 3)
    sent = []
    for step in range(6):
        simulation.step([{"w": gradients.draw("normal", 1000, 10 * step + rank)} for rank in range(3)])
        sent.append(max(simulation.bytes_sent))
    assert sent == sorted(sent, reverse=True) and sent[0] > 5 * sent[-1]


@pytest.mark.parametrize("spec", ["gtopk:ratio=0.05", "topk:ratio=0.05,route=tree", "topk:ratio=0.05,route=split"])
def test_many_ranks_with_huge_entries_leave_every_value_finite(spec: str) -> None:
    """Sums of many entries near the largest float stay with a rank, and are added to a residual that is full."""
    world, generator = 32, torch.Generator().manual_seed(1)
    simulation = gradcomp.Simulation(spec, {"w": (40, 30)}, world)
    for step in range(8):
        grads = [torch.randn(40, 30, generator=generator) for _ in range(world)]
        if 2 <= step < 5:
            grads = [each.sign() * (2e38 + 1.4e38 * torch.rand(40, 30, generator=generator)) for each in grads]
        assert simulation.step([{"w": each} for each in grads])["w"].isfinite().all()
        assert all(simulation.residual(rank)["w"].isfinite().all() for rank in range(world))
