"""flatten and accumulate: gradients in; and the types of 16 bits, in and out."""

from __future__ import annotations

import gradients
import pytest
import reference
import torch
from payload_arrays import flag_on
from torch import Tensor

from gradcomp.native import kernels

SIZES = [[3, 0, 5], [2047, 2049, 1, 70], [64] * 300]
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def pieces(sizes: list[int], dtype: torch.dtype, device: torch.device, kind: str = "normal") -> list[Tensor]:
    return [
        gradients.draw(kind, n, seed).to(dtype).to(device) if n else torch.empty(0, dtype=dtype, device=device)
        for seed, n in enumerate(sizes)
    ]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_flatten_casts_and_concatenates(device: torch.device, sizes: list[int], dtype: torch.dtype) -> None:
    grads = pieces(sizes, dtype, device)
    flat = torch.full((sum(sizes),), 7.0, device=device)
    kernels.flatten(grads, flat)
    assert reference.same(flat, reference.flatten(grads))


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_accumulate_is_its_definition(device: torch.device, sizes: list[int], dtype: torch.dtype, factor: float) -> None:
    grads = pieces(sizes, dtype, device)
    residual = torch.randn(sum(sizes), device=device)
    flag = flag_on(device, 5)
    expected = factor * residual + reference.flatten(grads)
    kernels.accumulate(grads, residual, flag, residual_factor=factor)
    assert reference.same(residual, expected) and flag.item() == 0


def test_a_refused_gradient_counts_as_0_also_in_a_zeros_sign(device: torch.device) -> None:
    """0 * -1 + 0 is 0 and not -0, by both twins."""
    residual, flag = torch.tensor([-1.0, 1.0, -0.0], device=device), flag_on(device, 0)
    kernels.accumulate([torch.full((3,), torch.inf, device=device)], residual, flag, residual_factor=0.0)
    assert residual.tolist() == [0.0] * 3 and not residual.signbit().any() and flag.item() == 1


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


@pytest.mark.parametrize("dtype", TYPES[1:])
def test_rounding_to_half_types_is_to_nearest_even(device: torch.device, dtype: torch.dtype) -> None:
    flat = neighbourhoods()
    out = torch.empty(flat.numel(), dtype=dtype, device=device)
    kernels.spread(flat.to(device), [out])
    assert reference.same(out.cpu(), flat.to(dtype))
