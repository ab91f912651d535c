"""Rounded entries by parts: parts of any number of groups, and traffic that does not grow with the ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradcomp
from gradcomp.core.wrapper import Wrapper
from gradcomp.exchanges.rounded import SECONDS_PER_BYTE, SECONDS_PER_OPERATION, GroupPartition, Rounded
from gradcomp.messages import payload as payloads

GROUP = 32


def rounded(spec: str) -> Rounded:
    """Return a spec's compressor, without its wrappers."""
    made = gradcomp.make(spec)
    while isinstance(made, Wrapper):
        made = made.inner
    assert isinstance(made, Rounded)
    return made


@given(st.integers(1, 5000), st.sampled_from([32, 256]), st.integers(1, 300))
def test_parts_tile_the_bucket_and_differ_by_a_group(n: int, group: int, ranks: int) -> None:
    parts = GroupPartition(n, group, ranks)
    lengths = [parts.length(rank) for rank in range(ranks)]
    assert parts.first(0) == 0 and parts.first(ranks) == n and sum(lengths) == n and max(lengths) == parts.longest
    assert all(parts.first(rank) % group == 0 for rank in range(ranks))
    whole = [length // group for length in lengths[:-1]]  # the last part may end with a group of another size
    assert not whole or (max(whole) - min(whole) <= 1 and min(lengths[-1], n - 1) >= min(whole) * group)
    assert [rank for rank in range(ranks) if lengths[rank]] == [*parts.owners]


@pytest.mark.parametrize("spec", ["blocks", "half", "orq", "orq:levels=9"])
@pytest.mark.parametrize("ranks", [2, 4, 16, 60, 64, 256, 1000, 1024])
@pytest.mark.parametrize("n", [192, 1000, 4096, 70_001, 1_100_000, 2_760_442, 6_250_000])
def test_the_traffic_of_auto_does_not_grow_with_the_ranks(spec: str, ranks: int, n: int) -> None:
    """Each entry there and back, at most a group more for each rank, and what an operation more would take."""
    made = rounded(spec)
    whole, part = (payloads.size(made.rounding(each).form) for each in (n, GroupPartition(n, made.group, ranks).longest))
    by_parts = made.route_of(n, ranks) == "alltoall"
    sent = 2 * (ranks - 1) * part if by_parts else (ranks - 1) * whole
    group = payloads.size(made.rounding(min(n, made.group + 31)).form)
    assert sent <= 2 * whole + 2 * ranks * group + SECONDS_PER_OPERATION / SECONDS_PER_BYTE
    assert not by_parts or sent * SECONDS_PER_BYTE + SECONDS_PER_OPERATION < (ranks - 1) * whole * SECONDS_PER_BYTE


@pytest.mark.parametrize("groups, ranks", [(1, 2), (3, 8), (10, 8), (9, 4), (33, 16)])
@pytest.mark.parametrize("rest", [0, 5])
@pytest.mark.parametrize("feedback", ["true", "false"])
def test_the_mean_of_any_number_of_groups(groups: int, ranks: int, rest: int, feedback: str) -> None:
    """Equal entries of a group are rounded to themselves, so the sum is exact. A NaN of one rank reaches all."""
    n = GROUP * groups + rest
    values = torch.randn(-(-n // GROUP), generator=torch.Generator().manual_seed(n)).repeat_interleave(GROUP)[:n]
    values[GROUP * groups :] = values[GROUP * groups - 1]  # the rest joins the last group
    simulation = gradcomp.Simulation(f"blocks:bits=8,feedback={feedback},route=alltoall", {"w": (n,)}, ranks)
    grads = [{"w": values * (rank + 1)} for rank in range(ranks)]
    mean = values * (ranks + 1) / 2
    torch.testing.assert_close(simulation.step(grads)["w"], mean, rtol=1e-6, atol=0)
    broken = [{"w": torch.full((n,), torch.nan)}, *grads[1:]]
    assert not simulation.step(broken)["w"][0].isfinite()
    waits = values * (sum(range(2, ranks + 1)) / ranks if feedback == "true" else 0)  # what the other ranks had taken
    torch.testing.assert_close(simulation.step(grads)["w"], mean + waits, rtol=1e-5, atol=0)
