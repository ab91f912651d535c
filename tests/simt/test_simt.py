"""The emulator keeps its promises: CUDA's meaning where a kernel is right, an error with names where it is wrong."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

SANITIZED = os.environ.get("GRADCOMP_SIMT_SANITIZED") == "1"
BLOCK = 256  # threads, in most kernels here
GARBAGE = 0xCDCDCDCD


@pytest.fixture(scope="module")
def folder() -> Path:
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        builder = importlib.import_module("build")
    finally:
        sys.path.pop(0)
    return builder.build(sanitize=SANITIZED)


@pytest.fixture
def simt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(folder))
    module = importlib.import_module("simt_selftest")
    module.set_order(True)
    return module


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
    """Bit for bit, except that a NaN is a NaN."""
    nan = np.isnan(a)
    return np.array_equal(nan, np.isnan(b)) and np.array_equal(a[~nan].view(np.uint32), b[~nan].view(np.uint32))


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
    """Every float that is a half or bfloat16, or half way between two, and its neighbours; then any bits at all."""
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


def test_a_missing_barrier_shows_in_one_of_the_orders(simt: Any) -> None:
    seen = []
    for shuffled in (False, True):
        simt.set_order(shuffled)
        out = words(64)
        simt.race(out)
        seen.append(out[1:])
    assert np.all(seen[0] == 7)
    assert np.all(seen[1] == GARBAGE)


# ---- Wrong kernels and launches raise, and the next launch is a fresh one


def check_next_launch(simt: Any) -> None:
    out = words(100)
    simt.ends_early(out)
    assert out[1] == 66


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (
            "divergent_barrier",
            r"divergent_barrier: block \(0, 0, 0\) is stuck: thread \(0, 0, 0\) waits at __syncthreads in selftest.cu:\d+ "
            r"\(40 of 64 threads\); thread \(40, 0, 0\) waits at __syncthreads_or in selftest.cu:\d+ \(24 of 64 threads\)",
        ),
        (
            "barrier_against_shuffle",
            r"waits at __syncthreads .* waits at __shfl_sync .* with mask 0xffffffff .* 32 threads have ended",
        ),
        ("missing_lane", r"waits at __shfl_xor_sync in selftest.cu:\d+ with mask 0xffffffff \(31 of 64 threads\); 33 threads"),
        ("unnamed_lane", r"thread \(\d+, 0, 0\) waits at __shfl_sync .* with mask 0xffff, which does not name lane \d+"),
    ],
)
@pytest.mark.parametrize("shuffled", [False, True])
def test_threads_that_wait_in_vain_are_named(simt: Any, kernel: str, says: str, shuffled: bool) -> None:
    simt.set_order(shuffled)
    with pytest.raises(RuntimeError, match=says):
        getattr(simt, kernel)(words(128))
    check_next_launch(simt)


@pytest.mark.parametrize(
    ("blocks", "threads", "shared"),
    [(1, 1025, 0), (1, 0, 0), (0, 32, 0), (2**31, 32, 0), (1, 32, 48 * 1024 + 1)],
)
def test_a_launch_that_no_device_takes_is_refused(simt: Any, blocks: int, threads: int, shared: int) -> None:
    with pytest.raises(RuntimeError, match=r"CUDA: invalid (configuration )?argument in cudaGetLastError"):
        simt.launch(words(8), blocks, threads, shared)
    check_next_launch(simt)


def test_more_shared_memory_must_be_asked_for(simt: Any) -> None:
    simt.launch(words(8), 1, 1024, 48 * 1024)
    simt.allow_shared(227 * 1024)
    simt.launch(words(8), 1, 32, 227 * 1024)
    with pytest.raises(RuntimeError, match="invalid argument"):
        simt.launch(words(8), 1, 32, 227 * 1024 + 1)
    with pytest.raises(RuntimeError, match="invalid argument"):
        simt.allow_shared(227 * 1024 + 1)
    simt.allow_shared(0)


# ---- What AddressSanitizer sees; only a sanitised build, which scripts/check makes, can be asked

sanitized = pytest.mark.skipif(not SANITIZED, reason="the emulator was built without AddressSanitizer")

CALL = """
import sys
sys.path.insert(0, {folder!r})
import numpy as np, simt_selftest
{body}
print("still here")
"""


@pytest.fixture
def report(folder: Path) -> Callable[[str], str]:
    """Runs Python code in a process of its own and tells what it wrote to both outputs."""

    def run(body: str) -> str:
        code = CALL.format(folder=str(folder), body=body)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert (done.returncode == 0) == ("still here" in done.stdout)
        return done.stdout + done.stderr

    return run


@sanitized
@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("overrun_global", "heap-buffer-overflow"),
        ("overrun_dynamic", "heap-buffer-overflow"),
        ("overrun_static", "global-buffer-overflow"),
        ("overrun_stack", "stack-buffer-overflow"),
    ],
)
def test_an_overrun_is_reported(report: Callable[[str], str], kernel: str, kind: str) -> None:
    assert "still here" in report(f"simt_selftest.{kernel}(np.zeros(32, np.uint32), 0)")
    told = report(f"simt_selftest.{kernel}(np.zeros(32, np.uint32), 1)")
    assert f"ERROR: AddressSanitizer: {kind}" in told
    assert f"in {kernel} " in told


@sanitized
def test_a_vector_that_is_not_aligned_is_reported(report: Callable[[str], str]) -> None:
    told = report("a = np.zeros(1024, np.float32); simt_selftest.move_vectors(a, a.copy(), 1)")
    assert "misaligned address" in told
