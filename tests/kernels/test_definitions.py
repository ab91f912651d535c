"""Every kernel leaves what its definition in tests/fuzz says, on every device, around the sizes at which kernels change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fuzz import call, gradients, run, watched
from fuzz.drawn import Draw

from gradcomp.native import extension

KERNELS = [name for name in run.kernels() if name in call.MAKERS]
# Sizes, and the calls of each. The largest has blocks of packed entries of two sizes; it takes the emulator a while.
CALLS = {1: 30, 66: 60, 1023: 30, 2049: 30, 8193: 12, 70_001: 4}


class Sized(Draw):
    """Draws of buckets of one size."""

    n = 0

    def size(self, least: int = 0, wide: bool = True) -> int:
        return max(self.n, least)


@pytest.fixture
def native(device: torch.device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The device's kernels, with the scratch that its twins need."""
    if request.node.callspec.params["device"] == "cpu":
        return extension.native
    monkeypatch.setattr(extension, "native", extension.native)  # restored after the test
    return watched.twin_of(extension.native, request.node.callspec.params["device"])


def failure_of(native: Any, device: torch.device, kernel: str, n: int, number: int) -> str:
    draw = Sized(f"{kernel} {n} {number}")
    draw.n, draw.for_cpu = n, not isinstance(native, watched.Twin)
    return watched.failure_of(native, kernel, draw, device.type)


@pytest.mark.parametrize("n", CALLS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_leaves_what_its_definition_says(native: Any, device: torch.device, kernel: str, n: int) -> None:
    for number in range(CALLS[n]):
        assert failure_of(native, device, kernel, n, number) == ""


def test_an_update_too_large_for_the_cache_is_spread_past_it() -> None:
    assert failure_of(extension.native, torch.device("cpu"), "spread", gradients.PAST_CACHE + 77, 0) == ""
