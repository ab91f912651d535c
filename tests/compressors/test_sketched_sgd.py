"""sketched_sgd: tables to a server, exact values at its candidates, the largest sums back."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from compressors.test_gs_sgd import skewed

import gradcomp


def _padded(words: int) -> int:
    return 8 * math.ceil(words / 2)


def _bytes(ratio: float, candidates: int = 4, rows: int = 5, columns: int = 0) -> Callable[[int, int, int], int]:
    """Ranks send a table and the values asked for, each with a flag behind it; the server the places it asks about, and
    k sums with their places, to all others; each rounded up to 8 bytes. Or everything in one reduction, if that is no more."""

    def promised(n: int, rank: int, world: int) -> int:
        k = max(1, math.ceil(ratio * n))
        asked = min(n, candidates * k)
        cells = rows * (columns or max(1, 5 * k // 16) * 16)
        if cells + asked >= n:
            return 4 * n
        if rank == 0:
            return (world - 1) * (_padded(asked) + _padded(2 * k + 1))
        return _padded(cells + 1) + _padded(asked + 1)

    return promised


PROMISED_BYTES = {
    "sketched_sgd": _bytes(0.01),
    "sketched_sgd:ratio=0.01,rows=3,columns=160,candidates=2": _bytes(0.01, 2, 3, 160),
}


@pytest.mark.parametrize("world", [1, 2, 5])
def test_it_finds_the_same_entries_as_gs_sgd(world: int) -> None:
    """The table and the hash are the same. Only the way differs."""
    grads = [{"w": skewed(20_000, rank)} for rank in range(world)]
    knobs = "ratio=0.001,columns=320"
    ours, theirs = (gradcomp.Simulation(f"{name}:{knobs}", {"w": (20_000,)}, world) for name in ("sketched_sgd", "gs_sgd"))
    for _ in range(3):
        torch.testing.assert_close(ours.step(grads)["w"], theirs.step(grads)["w"], rtol=1e-5, atol=1e-6)  # sums in other orders
