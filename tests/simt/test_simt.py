"""The emulator gives right kernels CUDA's meaning, in every order of threads and blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

# Threads of a block, in most kernels here.
BLOCK = 256
GARBAGE = 0xCDCDCDCD


def words(n: int) -> np.ndarray:
    return np.zeros(n, np.uint32)


def draw(n: int, most: int = 1000) -> np.ndarray:
    return np.random.default_rng(n).integers(0, most, n).astype(np.uint32)


# ---- Right kernels


def test_a_scan_over_200_000_threads(simt: Any) -> None:
    x = draw(200_192)
    sums, totals = words(x.size), words(x.size // BLOCK)
    simt.scan(x, sums, totals)
    inclusive = x.reshape(-1, BLOCK).cumsum(1)
    assert np.array_equal(sums.reshape(-1, BLOCK), inclusive - x.reshape(-1, BLOCK))
    assert np.array_equal(totals, inclusive[:, -1])


@pytest.mark.parametrize("width", [32, 16, 8, 4])
def test_shuffles(simt: Any, width: int) -> None:
    x = draw(1024)
    out = words(4 * x.size)
    simt.shuffles(x, out, width)
    lane = np.arange(width)
    parts = x.reshape(-1, width)
    one, up, down, xor = out.reshape(4, -1, width)
    assert np.array_equal(one, np.repeat(parts[:, 5 % width], width).reshape(parts.shape))
    assert np.array_equal(up, parts[:, np.where(lane < 3, lane, lane - 3)])
    assert np.array_equal(down, parts[:, np.where(lane + 3 < width, lane + 3, lane)])
    # A partner in an earlier segment may be read, one in a later segment may not.
    lane = np.arange(32)
    partner = np.where((lane ^ 6) < lane // width * width + width, lane ^ 6, lane)
    assert np.array_equal(xor.reshape(-1, 32), x.reshape(-1, 32)[:, partner])


@pytest.mark.parametrize("chance", [0.0, 0.02, 0.5, 0.98, 1.0])
def test_votes(simt: Any, chance: float) -> None:
    x = (np.random.default_rng(3).random(1024) < chance).astype(np.int32)
    out = words(4 * x.size)
    simt.votes(x, out)
    ballot, some, count, both = out.reshape(4, -1)
    warps, blocks = x.reshape(-1, 32), x.reshape(-1, BLOCK)
    assert np.array_equal(ballot, np.repeat((warps.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1), 32))
    assert np.array_equal(some[::2], np.repeat(warps[:, ::2].any(1), 16))
    assert np.array_equal(some[1::2], np.repeat(warps[:, 1::2].all(1), 16))
    assert np.array_equal(count, np.repeat(blocks.sum(1), BLOCK))
    assert np.array_equal(both, np.repeat(2 * blocks.any(1) + blocks.all(1), BLOCK))


def test_atomics(simt: Any) -> None:
    x = np.random.default_rng(4).integers(1, 2**20, 2048).astype(np.int32)
    out = np.array([0, 0, 2**30, 0, -1, 0, 0, 0], np.int32)
    total, wide = np.zeros(1, np.float32), np.zeros(1, np.uint64)
    simt.atomics(x, out, total, wide)
    assert out[:5].tolist() == [x.sum(), x.max(), x.min(), np.bitwise_or.reduce(x), np.bitwise_and.reduce(x)]
    assert out[5] in x
    assert out[6] in x
    assert out[7] == 1
    assert total[0] == x.size
    assert wide[0] == x.size << 32


def test_shared_memory_static_and_dynamic_begins_as_garbage(simt: Any) -> None:
    x = draw(20 * BLOCK)
    out = words(4 * x.size)
    simt.reverse(x, out)
    static, dynamic, *before = out.reshape(4, -1, BLOCK)
    assert np.array_equal(static, x.reshape(-1, BLOCK)[:, ::-1])
    assert np.array_equal(dynamic, static)
    assert np.all(np.array(before) == GARBAGE)


def test_a_template_has_shared_memory_of_its_own_too(simt: Any) -> None:
    """GCC ignores a section attribute in templates: the memory once held the words of the last block."""
    out = words(20 * 32)
    simt.left_over(out)
    assert np.all(out == GARBAGE)


def test_scratch_is_garbage_at_every_call(emulator: Any) -> None:
    x, squares, scratch = torch.ones(100), torch.zeros(1, dtype=torch.float64), torch.zeros(1000, dtype=torch.int32)
    for _ in range(2):
        emulator.sum_squares([x], squares, scratch)
        assert squares[0] == 100
        assert scratch.numpy().view(np.uint32)[-1] == GARBAGE
        scratch.zero_()


def test_three_dimensions(simt: Any) -> None:
    out = words(24 * 210)
    simt.places(out)
    assert np.array_equal(out, (np.arange(24)[:, None] * 1000 + np.arange(210)).ravel())


def test_threads_that_have_ended_are_not_waited_for(simt: Any) -> None:
    out = words(100)
    simt.ends_early(out)
    assert np.array_equal(out, np.where(np.arange(100) % 3 == 0, 0, 66))


def test_vectors_move_whole(simt: Any) -> None:
    x = np.arange(512, dtype=np.float32)
    out = np.zeros_like(x)
    simt.move_vectors(x, out, 0)
    assert np.array_equal(out, x)


# ---- Number formats: CUDA's conversions and math.h's, against NumPy's and torch's


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Compare to the last bit, except that all NaNs are equal."""
    nan = np.isnan(a)
    return np.array_equal(nan, np.isnan(b)) and np.array_equal(a[~nan].view(np.uint32), b[~nan].view(np.uint32))


def test_of_a_number_and_a_nan_the_number_is_smallest_and_largest(simt: Any) -> None:
    a, b, out = (np.zeros(size, np.float32) for size in (32, 32, 64))
    a[:4] = [1, np.nan, 2, np.nan]
    b[:4] = [np.nan, 1, 3, np.nan]
    simt.bounds(a, b, out)
    assert same(out[:4], np.fmin(a, b)[:4])
    assert same(out[32:36], np.fmax(a, b)[:4])


def test_every_half_pattern_widens(simt: Any) -> None:
    patterns = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    out = np.zeros(4 * patterns.size, np.float32)
    simt.widen(patterns, out)
    f16, ours_f16, bf16, ours_bf16 = out.reshape(4, -1)
    wanted_f16 = patterns.view(np.float16).astype(np.float32)
    wanted_bf16 = torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert same(f16, wanted_f16)
    assert same(ours_f16, wanted_f16)
    assert same(bf16, wanted_bf16)
    assert same(ours_bf16, wanted_bf16)


def neighbourhoods() -> np.ndarray:
    """List every half and bfloat16, every middle between two, and their neighbours; then random bits."""
    patterns = np.arange(65536, dtype=np.uint32)
    f16 = patterns.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    around = [base + shift for base in (f16, f16 + 0x1000, patterns << 16, (patterns << 16) + 0x8000) for shift in (0, 1)]
    around.append(np.random.default_rng(5).integers(0, 2**32, 65536, dtype=np.uint64).astype(np.uint32))
    return np.concatenate(around).view(np.float32)


def test_floats_narrow_to_the_nearest_half(simt: Any) -> None:
    x = neighbourhoods()
    wanted_bf16 = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        wanted_f16 = x.astype(np.float16).astype(np.float32)
    for part in range(0, x.size, 65536):
        here = slice(part, part + 65536)
        out = np.zeros(4 * 65536, np.uint16)
        simt.narrow(x[here], out)
        f16, ours_f16, bf16, ours_bf16 = out.reshape(4, -1)
        for got in (f16, ours_f16):
            assert same(got.view(np.float16).astype(np.float32), wanted_f16[here])
        for got in (bf16, ours_bf16):
            assert same((got.astype(np.uint32) << 16).view(np.float32), wanted_bf16[here])


# ---- Orders

both_orders = pytest.mark.parametrize("shuffled", [False, True])


@both_orders
def test_scans_may_follow_each_other(simt: Any, shuffled: bool) -> None:
    simt.set_order(shuffled)
    x = draw(2 * BLOCK)
    sums, totals = words(x.size), words(x.size)
    simt.scan_twice(x, sums, totals)
    parts = x.reshape(2, BLOCK)
    assert np.array_equal(sums.reshape(2, BLOCK), parts.cumsum(1) - parts)
    assert np.array_equal(totals.reshape(2, BLOCK), np.repeat(parts.sum(1, keepdims=True), BLOCK, 1))


@both_orders
@pytest.mark.parametrize("wanted", [1, 700, 4000])
def test_all_threads_see_the_digit_that_is_picked(simt: Any, shuffled: bool, wanted: int) -> None:
    simt.set_order(shuffled)
    x = draw(20 * BLOCK, BLOCK)
    out = words(2 * BLOCK)
    simt.pick(x, wanted, words(BLOCK), words(1), out)
    digit = np.sort(x)[-wanted]
    assert np.all(out[:BLOCK] == digit) and np.all(out[BLOCK:] == (x > digit).sum())


@both_orders
def test_the_last_block_reads_the_results_of_all(simt: Any, shuffled: bool) -> None:
    simt.set_order(shuffled)
    out = words(BLOCK)
    simt.last_block(words(30 * BLOCK), words(1), out)
    assert np.all(out == 30)


def order_of(simt: Any, shuffled: bool, blocks: int = 50) -> list[int]:
    simt.set_order(shuffled)
    out = words(blocks)
    simt.block_order(words(1), out)
    return out.tolist()


def test_blocks_run_in_order_or_shuffled_the_same_way_each_time(simt: Any) -> None:
    plain, shuffled = order_of(simt, False), order_of(simt, True)
    assert plain == list(range(50))
    assert sorted(shuffled) == plain
    assert shuffled != plain
    assert order_of(simt, True) == shuffled


def test_a_right_kernel_does_not_depend_on_the_order(simt: Any) -> None:
    x = draw(40 * BLOCK)
    results = []
    for shuffled in (False, True):
        simt.set_order(shuffled)
        sums, totals = words(x.size), words(40)
        simt.scan(x, sums, totals)
        results.append((sums, totals))
    assert np.array_equal(results[0][0], results[1][0])
    assert np.array_equal(results[0][1], results[1][1])
