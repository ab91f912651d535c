"""The emulator refuses wrong kernels and launches by name, and the next launch is a fresh one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import SANITIZED

both_orders = pytest.mark.parametrize("shuffled", [False, True])


def words(n: int) -> np.ndarray:
    return np.zeros(n, np.uint32)


def check_next_launch(simt: Any) -> None:
    out = words(100)
    simt.ends_early(out)
    assert out[1] == 66


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (
            "divergent_barrier",
            r"divergent_barrier: block \(0, 0, 0\) is stuck: thread \(0, 0, 0\) waits at __syncthreads in wrong.cu:\d+ "
            r"\(40 of 64 threads\); thread \(40, 0, 0\) waits at __syncthreads_or in wrong.cu:\d+ \(24 of 64 threads\)",
        ),
        (
            "barrier_against_shuffle",
            r"waits at __syncthreads .* waits at __shfl_sync .* with mask 0xffffffff .* 32 threads have ended",
        ),
        ("missing_lane", r"waits at __shfl_xor_sync in wrong.cu:\d+ with mask 0xffffffff \(31 of 64 threads\); 33 threads"),
        ("unnamed_lane", r"thread \(\d+, 0, 0\) waits at __shfl_sync .* with mask 0xffff, which does not name lane \d+"),
    ],
)
@both_orders
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


def test_a_vector_that_is_not_aligned_is_named(simt: Any) -> None:
    x = np.zeros(1024, np.float32)
    with pytest.raises(RuntimeError, match=r"move_vectors: .* uses the misaligned address 0x\w+ in right.cu"):
        simt.move_vectors(x, x.copy(), 1)
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


# ---- AddressSanitizer, which needs the sanitised build of scripts/check

sanitized = pytest.mark.skipif(not SANITIZED, reason="the emulator was built without AddressSanitizer")

CALL = """
import sys
sys.path.insert(0, {folder!r})
import numpy as np, simt_selftest
{body}
print("still here")
"""


@pytest.fixture
def report(emulator_folder: str) -> Callable[[str], str]:
    """Run Python code in a process of its own, and return both of its outputs."""

    def run(body: str) -> str:
        code = CALL.format(folder=emulator_folder, body=body)
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
