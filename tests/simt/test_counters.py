"""The emulator counts sectors, bank conflicts and atomics of one address. Streaming kernels ask for their bytes and no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import SANITIZED
from counters import counted

from gradcomp.native import extension, kernels

pytestmark = pytest.mark.skipif(SANITIZED, reason="AddressSanitizer and the shadow exclude each other")

SECTOR = 32
N = 65536


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (4, 16), (8, 32), (16, 32)])
def test_sectors_of_a_strided_read(simt: Any, stride: int, sectors: int) -> None:
    x, out = torch.zeros(128 * stride, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    with counted(simt) as counts:
        simt.strided(x.numpy().view(np.uint32), out.numpy().view(np.uint32), stride)
    assert counts["requests"] == 4 + 4
    assert counts["sectors"] == 4 * sectors + 4 * 4
    assert counts["shared_requests"] == counts["atomics"] == 0


def test_sectors_of_vectors(simt: Any) -> None:
    x = torch.zeros(512)
    with counted(simt) as counts:
        simt.move_vectors(x.numpy(), torch.zeros(512).numpy(), 0)
    assert counts["requests"] == 2 * 4
    assert counts["sectors"] == 2 * 512 * 4 // SECTOR


@pytest.mark.parametrize(("stride", "conflicts"), [(0, 0), (1, 0), (2, 1), (3, 0), (4, 3), (32, 31)])
def test_conflicts_of_banks(simt: Any, stride: int, conflicts: int) -> None:
    with counted(simt) as counts:
        simt.banks(np.zeros(32, np.uint32), stride)
    assert (counts["shared_requests"], counts["conflicts"]) == (2, 2 * conflicts)


@pytest.mark.parametrize("addresses", [1, 4, 32])
def test_atomics_of_one_address(simt: Any, addresses: int) -> None:
    with counted(simt) as counts:
        simt.meets(np.zeros(32, np.uint32), addresses)
    assert (counts["atomics"], counts["same_address"]) == (64, 2 * (32 - addresses))


@pytest.mark.parametrize("route", ["flatten", "accumulate", "accumulate with velocity", "offer_all", "spread"])
def test_a_streaming_kernel_asks_for_no_more_sectors_than_its_bytes(
    emulator: Any, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """The bytes are those of ops.inc. Tables of pieces, flags and scales may add a hundredth."""
    monkeypatch.setattr(extension, "native", emulator)
    grads, residual, velocity = [torch.randn(N)], torch.zeros(N), torch.zeros(N)
    flag = torch.zeros(1, dtype=torch.int32)
    calls = {
        "flatten": (8, lambda: kernels.flatten(grads, residual)),
        "accumulate": (12, lambda: kernels.accumulate(grads, residual, None, flag)),
        "accumulate with velocity": (20, lambda: kernels.accumulate(grads, residual, velocity, flag, momentum=0.9)),
        "offer_all": (8, lambda: kernels.offer_all(residual, velocity, flag)),
        "spread": (8, lambda: kernels.spread(residual, grads)),
    }
    each, call = calls[route]
    with counted(emulator) as counts:
        call()
    least = each * N / SECTOR
    assert least <= counts["sectors"] <= 1.01 * least
    assert counts["conflicts"] == 0
