"""The emulator gives right kernels CUDA's meaning, refuses wrong ones and launches by name, and begins the next one afresh."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SANITIZED

# Threads of a block, in most kernels here.
BLOCK = 256
GARBAGE = 0xCDCDCDCD


def words(n: int) -> np.ndarray:
    return np.zeros(n, np.uint32)


def draw(n: int, most: int = 1000) -> np.ndarray:
    return np.random.default_rng(n).integers(0, most, n).astype(np.uint32)


def test_host_code_beside_kernels_may_use_every_atomic_operation(simt: Any) -> None:
    """Python's bindings use some of them, others from one version to the next."""
    # Agreed, before: add 4 to 12, sub 1, and 10, or 1, xor 2, exchange 7; then what is there.
    assert simt.host_atomics() == (1_12_16_15_10_11_09_07,) * 4


# ---- Right kernels


def test_a_scan_over_200_000_threads(simt: Any) -> None:
    x = draw(200_192)
    sums, totals = words(x.size), words(x.size // BLOCK)
    simt.scan(x, sums, totals)
    inclusive = x.reshape(-1, BLOCK).cumsum(1)
    assert np.array_equal(sums.reshape(-1, BLOCK), inclusive - x.reshape(-1, BLOCK))
    assert np.array_equal(totals, inclusive[:, -1])


@pytest.mark.parametrize("width", [32, 16, 4])
def test_shuffles(simt: Any, width: int) -> None:
    x = draw(1024)
    out = words(4 * x.size)
    simt.shuffles(x, out, width)
    one, up, down, xor = out.reshape(4, -1, 32)
    assert np.array_equal(one.reshape(-1, width), np.repeat(x.reshape(-1, width)[:, [5 % width]], width, 1))
    warps, lane = x.reshape(-1, 32), np.arange(32)
    assert np.array_equal(up, warps[:, np.where(lane < 3, lane, lane - 3)])
    assert np.array_equal(down, warps[:, np.where(lane + 3 < 32, lane + 3, lane)])
    assert np.array_equal(xor, warps[:, lane ^ 6])


@pytest.mark.parametrize("chance", [0.0, 0.02, 0.98, 1.0])
def test_votes(simt: Any, chance: float) -> None:
    x = (np.random.default_rng(3).random(1024) < chance).astype(np.int32)
    out = words(2 * x.size)
    simt.votes(x, out)
    of_warps, of_blocks = out.reshape(2, -1, 32)
    warps = x.reshape(-1, 32)
    ballot = (warps[:, ::2].astype(np.uint64) << np.arange(0, 32, 2, dtype=np.uint64)).sum(1)
    assert np.array_equal(of_warps[:, ::2], np.repeat(ballot[:, None], 16, 1))
    assert np.array_equal(of_warps[:, 1::2], np.repeat(warps[:, 1::2].all(1, keepdims=True), 16, 1))
    assert np.array_equal(of_blocks.reshape(-1, BLOCK), np.repeat(x.reshape(-1, BLOCK).any(1, keepdims=True), BLOCK, 1))


def test_atomics(simt: Any) -> None:
    x = np.random.default_rng(4).integers(1, 2**20, 2048).astype(np.int32)
    out = np.zeros(6, np.int32)
    simt.atomics(x, out)
    assert out[:3].tolist() == [x.sum(), x.max(), np.bitwise_or.reduce(x)]
    assert out[3] in x and out[4] in x and out[5] == 1


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


def test_threads_that_have_ended_are_not_waited_for(simt: Any) -> None:
    out = words(100)
    simt.ends_early(out)
    assert np.array_equal(out, np.arange(100) % 3 != 0)


def test_vectors_move_whole(simt: Any) -> None:
    x = np.arange(512, dtype=np.float32)
    out = np.zeros_like(x)
    simt.move_vectors(x, out, 0)
    assert np.array_equal(out, x)


def test_blocks_run_shuffled_the_same_way_each_time(simt: Any) -> None:
    orders = [words(50) for _ in range(2)]
    for out in orders:
        simt.block_order(words(1), out)
    assert np.array_equal(*orders)
    assert sorted(orders[0].tolist()) == list(range(50)) != orders[0].tolist()


# ---- Wrong kernels and launches


def check_next_launch(simt: Any) -> None:
    out = words(100)
    simt.ends_early(out)
    assert out[1] == 1


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (
            "divergent_barrier",
            r"divergent_barrier: block \d+ is stuck: thread 0 waits at __syncthreads in wrong.cu:\d+ "
            r"\(40 of 64 threads\); thread 40 waits at __syncthreads_or in wrong.cu:\d+ \(24 of 64 threads\)",
        ),
        (
            "barrier_against_shuffle",
            r"waits at __syncthreads .* waits at __shfl_sync .* with mask 0xffffffff .* 32 threads have ended",
        ),
        ("missing_lane", r"waits at __shfl_xor_sync in wrong.cu:\d+ with mask 0xffffffff \(31 of 64 threads\); 33 threads"),
        ("unnamed_lane", r"thread \d+ waits at __shfl_sync .* with mask 0xffff, which does not name lane \d+"),
    ],
)
def test_threads_that_wait_in_vain_are_named(simt: Any, kernel: str, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        getattr(simt, kernel)(words(128))
    check_next_launch(simt)


@pytest.mark.parametrize(
    ("blocks", "threads", "shared"),
    [(1, 1025, 0), (1, 0, 0), (0, 32, 0), (2**31, 32, 0), (1, 32, 48 * 1024 + 1)],
)
def test_a_launch_that_no_device_takes_is_refused(simt: Any, blocks: int, threads: int, shared: int) -> None:
    simt.launch(words(8), 1, 1024, 48 * 1024)
    with pytest.raises(RuntimeError, match=r"CUDA: invalid (configuration )?argument in cudaGetLastError"):
        simt.launch(words(8), blocks, threads, shared)
    check_next_launch(simt)


def test_a_vector_that_is_not_aligned_is_named(simt: Any) -> None:
    x = np.zeros(1024, np.float32)
    with pytest.raises(RuntimeError, match=r"move_vectors: .* uses the misaligned address 0x\w+ in right.cu"):
        simt.move_vectors(x, x.copy(), 1)
    check_next_launch(simt)


# ---- AddressSanitizer, which needs the sanitised build of scripts/check

CALL = """
import sys
sys.path.insert(0, {folder!r})
import numpy as np, simt_selftest
simt_selftest.{kernel}(np.zeros(32, np.uint32), {by})
print("still here")
"""


@pytest.mark.skipif(not SANITIZED, reason="the emulator was built without AddressSanitizer")
@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("overrun_global", "heap-buffer-overflow"),
        ("overrun_dynamic", "heap-buffer-overflow"),
        ("overrun_static", "global-buffer-overflow"),
        ("overrun_stack", "stack-buffer-overflow"),
    ],
)
def test_an_overrun_is_reported(emulator_folder: str, kernel: str, kind: str) -> None:
    right, wrong = (
        subprocess.run(
            [sys.executable, "-c", CALL.format(folder=emulator_folder, kernel=kernel, by=by)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        for by in (0, 1)
    )
    assert right.returncode == 0 and right.stdout == "still here\n"
    assert wrong.returncode != 0 and not wrong.stdout
    assert f"ERROR: AddressSanitizer: {kind}" in wrong.stderr and f"in {kernel} " in wrong.stderr
