"""half: every entry in 16 bits, sums in 32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from payload_arrays import bytes_by
from torch import Tensor

import gradcomp


def payload(n: int) -> int:
    return 8 + 8 * -(-2 * n // 8)


PROMISED_BYTES: dict[str, Callable[..., int]] = {
    "half:feedback=true,route=allgather": bytes_by("allgather", 64, payload),
    "half:form=fp16,feedback=true,route=alltoall": bytes_by("alltoall", 64, payload),
}


def bf16(x: Tensor) -> Tensor:
    """Round to 8 bits, to even where both neighbours are as near, by the bits of a float."""
    bits = x.numpy().view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return torch.from_numpy(rounded.astype(np.uint32).view(np.float32).copy())


def drawn(n: int, world: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(n + world)
    return [{"w": torch.randn(n, generator=generator) * 10.0**rank} for rank in range(world)]


@pytest.mark.parametrize("n", [1, 63, 1000])
def test_the_update_is_the_mean_of_rounded_entries(n: int) -> None:
    grads = drawn(n, 3)
    update = gradcomp.Simulation("half:route=allgather", {"w": (n,)}, 3).step(grads)["w"]
    wanted = torch.stack([bf16(grad["w"]) for grad in grads]).double().mean(0)
    torch.testing.assert_close(update.double(), wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))


def test_sums_are_rounded_once_where_each_rank_adds_a_part() -> None:
    """Its own entries are not rounded before. A ring in bf16 would round the sum at each of 8 ranks."""
    n, world = 64 * 8, 8
    grads = drawn(n, world)
    update = gradcomp.Simulation("half:route=alltoall", {"w": (n,)}, world).step(grads)["w"]
    wanted = torch.empty(n)
    for owner in range(world):
        part = slice(64 * owner, 64 * owner + 64)
        sums = sum((grad["w"] if rank == owner else bf16(grad["w"]))[part].double() for rank, grad in enumerate(grads))
        assert isinstance(sums, Tensor)
        wanted[part] = bf16((sums / world).float())
    # Sums in float32 may lie on the other side of a border than sums in float64.
    near = (update - wanted).abs() <= 2.0**-7 * wanted.abs()
    assert near.all() and (update == wanted).float().mean() > 0.98


@pytest.mark.parametrize("form,largest", [("bf16", 3.3e38), ("fp16", 6.5e4)])
def test_the_range_is_the_types(form: str, largest: float) -> None:
    for route in ("allgather", "alltoall"):
        simulation = gradcomp.Simulation(f"half:form={form},route={route}", {"w": (256,)}, 3)
        grads = [{"w": torch.full((256,), largest)} for _ in range(3)]
        torch.testing.assert_close(simulation.step(grads)["w"], grads[0]["w"], rtol=2.0**-8, atol=0)
        for wrong in (torch.inf, torch.nan, *([7e4] if form == "fp16" else [])):
            grads[1]["w"][200] = wrong
            assert not simulation.step(grads)["w"].isfinite().all()


def test_with_feedback_entries_too_large_for_fp16_wait() -> None:
    simulation = gradcomp.Simulation("half:form=fp16,feedback=true", {"w": (4,)}, 2)
    grads = [{"w": torch.tensor([1e5, 1.0, -2e5, 0.0])}] * 2
    total = sum((simulation.step(grads if not step else [{"w": torch.zeros(4)}] * 2)["w"] for step in range(4)), torch.zeros(4))
    torch.testing.assert_close(total, grads[0]["w"], rtol=1e-6, atol=0)
