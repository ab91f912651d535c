"""The emulator reports accesses to memory whose order CUDA leaves open, and results that a GPU would give otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import SANITIZED

# The sanitised build is checked for overruns instead: the compiler cannot put both checks into one program.
pytestmark = pytest.mark.skipif(SANITIZED, reason="AddressSanitizer and the shadow exclude each other")

# Steps of a ticket, as in orders.cu.
STEPS = ["nothing", "first fence", "first barrier", "second barrier", "second fence", "second level"]


def words(n: int) -> np.ndarray:
    return np.zeros(n, np.uint32)


# Which of the two accesses comes first depends on the order; either way both are named.
def pair(memory: str, write: str, read: str) -> str:
    return rf"reads {memory} memory at 0x\w+ in {read}, which thread .* in {write}|" + (
        rf"(writes|changes by an atomic) {memory} memory at 0x\w+ in {write}, which threads? .* in {read}"
    )


LINE = r"orders\.cu:\d+"
WITHIN_A_BLOCK = {
    "told_twice": (64, pair("shared", LINE, LINE)),
    "lanes_exchange": (64, pair("shared", LINE, LINE)),
    "half_a_warp": (32, r"thread 16 reads shared .* thread 3 of|thread 3 writes shared .* thread 16 of"),
    "same_value": (1, r"writes global memory at .*, which thread \d+ of (this block|block \d+) writes in orders"),
    "counts": (1, r"thread 5 reads .* changes by an atomic in|changes by an atomic .* thread 5 of this block reads"),
    "peeks": (2, pair("global", LINE, LINE)),
}


@pytest.mark.parametrize("kernel", list(WITHIN_A_BLOCK))
def test_an_order_that_is_missing_within_a_block_is_named(simt: Any, kernel: str) -> None:
    size, says = WITHIN_A_BLOCK[kernel]
    getattr(simt, kernel)(words(size), False)
    with pytest.raises(RuntimeError, match=rf"{kernel}: block \d+: .*({says})"):
        getattr(simt, kernel)(words(size), True)
    getattr(simt, kernel)(words(size), False)


def test_bytes_of_a_word_belong_to_threads_of_their_own(simt: Any) -> None:
    out = np.zeros(64, np.uint8)
    simt.bytes_apart(out, False)
    assert np.array_equal(out, np.arange(64))
    with pytest.raises(RuntimeError, match=r"bytes_apart: .* writes global memory"):
        simt.bytes_apart(out, True)


@pytest.mark.parametrize("kernel", ["by_ticket", "by_one_fence"])
@pytest.mark.parametrize("missing", range(len(STEPS)), ids=STEPS)
def test_each_step_of_a_ticket_is_needed(simt: Any, kernel: str, missing: int) -> None:
    arrays = words(64 * 6), words(1), words(64)
    if missing == 0:
        getattr(simt, kernel)(*arrays, missing)
        assert np.all(arrays[2] == 1)
        return
    says = {
        1: r"reads global memory .* of block \d+ writes .*: no fence, ticket and fence",
        2: r"reads global memory .* of block \d+ writes .*: no fence, ticket and fence",
        3: r"reads shared memory .* writes .*: no barrier|writes shared memory .* reads .*: no barrier",
        4: r"reads global memory .* of block \d+ writes .*: no fence, ticket and fence",
        5: r"reads global memory .* wrote .* in this launch: without __ldcg, the first-level cache may",
    }[missing]
    with pytest.raises(RuntimeError, match=rf"{kernel}: block \d+: thread .*({says})"):
        getattr(simt, kernel)(*arrays, missing)


@pytest.mark.parametrize("missing", range(len(STEPS)), ids=STEPS)
def test_each_step_of_a_barrier_of_all_blocks_is_needed(simt: Any, missing: int) -> None:
    arrays = words(64 * 3), words(1), words(64 * 3)
    if missing == 0:
        simt.all_meet(*arrays, missing)
        assert np.all(arrays[2] == 1)
        return
    stale = "without __ldcg, the first-level cache" if missing == 5 else "no fence, ticket and fence"
    with pytest.raises(RuntimeError, match=rf"all_meet: block \d+: thread .* global memory .*{stale}"):
        simt.all_meet(*arrays, missing)


def test_a_wait_for_a_block_that_is_not_resident_is_named(simt: Any) -> None:
    with pytest.raises(RuntimeError, match=r"all_meet: .* looks for a change that never comes"):
        simt.all_meet(words(64 * 6), words(1), words(64 * 6), 0)


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("one_unfenced", r"reads global memory .* thread 5 of block \d+ writes"),
        ("overwrites", r"writes global memory .* of block \d+ reads|reads global memory .* of block \d+ writes"),
    ],
)
def test_a_block_that_publishes_too_little_is_named(simt: Any, kernel: str, says: str) -> None:
    sizes = (64 * 6, 1, 64) if kernel == "one_unfenced" else (64, 1, 64 * 6)
    getattr(simt, kernel)(*map(words, sizes), False)
    with pytest.raises(RuntimeError, match=rf"{kernel}: block \d+: thread .*({says})"):
        getattr(simt, kernel)(*map(words, sizes), True)


def test_a_wait_for_nothing_is_named(simt: Any) -> None:
    with pytest.raises(RuntimeError, match=r"waits_in_vain: .* looks for a change that never comes"):
        simt.waits_in_vain(words(1))


def test_blocks_take_turns(simt: Any) -> None:
    """A block meets others on its way."""
    log, place = words(40), words(1)
    simt.two_tickets(log, place)
    assert np.array_equal(np.sort(log), np.repeat(np.arange(20), 2))
    assert not np.array_equal(log[::2], log[1::2])


# ---- Operations that a GPU answers otherwise


@pytest.mark.parametrize(
    ("kernel", "right", "wrong", "says"),
    [
        ("shifts", 31, 32, "shifts by the number's width or more in orders.cu"),
        ("divides", 7, 0, "divides a whole number by 0 in orders.cu"),
        ("converts", 2.0**31 - 128, 2.0**31, "turns a float into a whole number that cannot hold it in orders.cu"),
        ("converts", -(2.0**31), float("nan"), "turns a float into a whole number"),
    ],
)
def test_an_operation_that_a_gpu_answers_otherwise_is_named(
    simt: Any, kernel: str, right: float, wrong: float, says: str
) -> None:
    getattr(simt, kernel)(words(1), right)
    with pytest.raises(RuntimeError, match=rf"{kernel}: block 0: thread 0 {says}"):
        getattr(simt, kernel)(words(1), wrong)
