"""The capacity follows counts eight steps later, so that no rank waits for its device."""

from __future__ import annotations

import torch

from gradcomp.compressors.sdagc.capacity import Capacity, rounded_up
from gradcomp.core.requests import Field, Payload
from gradcomp.messages import payload as payloads
from gradcomp.native.memory import DELAY


def counted(count: int) -> list[Payload]:
    """Make the payloads of two ranks, of which the second one wanted to send `count` entries."""
    received = [payloads.empty((Field("header", torch.int32, 2),), torch.device("cpu")) for _ in range(2)]
    for payload, own in zip(received, (1, count), strict=True):
        payload["header"].copy_(torch.tensor([own, 0]))
    return received


def entries_after(counts: list[int], capacity: Capacity) -> list[int]:
    """List the capacity after each of these counts."""
    seen = []
    for count in counts:
        capacity.observe(counted(count))
        seen.append(capacity.entries)
    return seen


def test_a_count_has_its_effect_eight_steps_later() -> None:
    seen = entries_after([128] * 20 + [5000] + [128] * 20, Capacity(128, 10_000))
    assert seen[: 20 + DELAY - 1] == [128] * (20 + DELAY - 1), "a count is read before its copy has ended"
    assert seen[20 + DELAY - 1] == rounded_up(5000)


def test_the_capacity_shrinks_once_eight_counts_are_smaller() -> None:
    seen = entries_after([5000] * 8 + [100] * 40, Capacity(100, 10_000))
    assert seen[DELAY - 1 : 8 + 2 * DELAY - 2] == [rounded_up(5000)] * (DELAY + 7)
    assert set(seen[8 + 2 * DELAY - 2 :]) == {rounded_up(100)}


def test_a_saved_capacity_goes_on_as_if_nothing_had_been() -> None:
    counts = [100] * 5 + [5000] + [100] * 30
    whole, first, second = (Capacity(100, 10_000) for _ in range(3))
    expected = entries_after(counts, whole)
    before = entries_after(counts[:11], first)
    second.load(first.save())
    assert before + entries_after(counts[11:], second) == expected
