"""Gradients in and updates out: zeros' signs, and every pattern of the types of 16 bits."""

from __future__ import annotations

import pytest
import reference
import torch
from payload_arrays import flag_on
from torch import Tensor

from gradcomp.native import kernels


def test_a_refused_gradient_counts_as_0_also_in_a_zeros_sign(device: torch.device) -> None:
    """By both twins, whatever lay there before."""
    flat, flag = torch.tensor([-1.0, torch.nan, -0.0], device=device), flag_on(device, 0)
    kernels.collect([torch.full((3,), -torch.inf, device=device)], flat, flag)
    assert flat.tolist() == [0.0] * 3 and not flat.signbit().any() and flag.item() == 1


def test_all_half_patterns_come_through(device: torch.device) -> None:
    patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).to(device)
    for dtype in (torch.float16, torch.bfloat16):
        halves = patterns.view(dtype)
        flat = torch.empty(halves.numel(), device=device)
        kernels.flatten([halves], flat)
        good = ~halves.isnan()
        assert torch.equal(flat[good], halves[good].float())
        assert flat[~good].isnan().all()


def neighbourhoods() -> Tensor:
    """List every half and bfloat16, every middle between two, and their neighbours; then random bits."""
    patterns = torch.arange(65536)
    halves = patterns.to(torch.uint16).view(torch.float16).float().view(torch.int32).long()
    around = [base + shift for base in (halves, halves + 0x1000, patterns << 16, (patterns << 16) + 0x8000) for shift in (0, 1)]
    bits = torch.cat([*around, torch.randint(2**32, (65536,))])
    return (bits & 0xFFFFFFFF).to(torch.uint32).view(torch.float32).nan_to_num()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_to_half_types_is_to_nearest_even(device: torch.device, dtype: torch.dtype) -> None:
    flat = neighbourhoods()
    out = torch.empty(flat.numel(), dtype=dtype, device=device)
    kernels.spread(flat.to(device), [out])
    assert reference.same(out.cpu(), flat.to(dtype))
