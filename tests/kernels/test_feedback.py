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


@pytest.mark.parametrize("momentum,nesterov", [(None, False), (0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_accumulate_is_its_definition(
    device: torch.device, sizes: list[int], dtype: torch.dtype, momentum: float | None, nesterov: bool
) -> None:
    grads = pieces(sizes, dtype, device)
    n = sum(sizes)
    residual = torch.randn(n, device=device)
    velocity = None if momentum is None else torch.randn(n, device=device)
    flag = flag_on(device, 5)
    expected = reference.accumulate(grads, residual, velocity, momentum or 0.0, nesterov)
    kernels.accumulate(grads, residual, velocity, flag, momentum or 0.0, nesterov)
    assert reference.same(residual, expected[0])
    if velocity is not None:
        assert expected[1] is not None and reference.same(velocity, expected[1])
    assert flag.item() == 0


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_a_refused_gradient_counts_as_0_also_in_a_zeros_sign(device: torch.device, momentum: float | None) -> None:
    """0 * -1 + 0 is 0 and not -0, by both twins."""
    residual, flag = torch.tensor([-1.0, 1.0, -0.0], device=device), flag_on(device, 0)
    velocity = None if momentum is None else torch.ones(3, device=device)
    grads = [torch.full((3,), torch.inf, device=device)]
    kernels.accumulate(grads, residual, velocity, flag, momentum or 0.0, residual_factor=0.0)
    assert residual.tolist() == [0.0] * 3 and not residual.signbit().any() and flag.item() == 1


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("of_gradient", [0.0, 0.25])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_second_moment_divides_the_added_gradient(
    device: torch.device, sizes: list[int], dtype: torch.dtype, of_gradient: float, local: bool
) -> None:
    grads = pieces(sizes, dtype, device)
    n = sum(sizes)
    if n > 1:
        grads[-1].view(-1)[-1] = float("inf")
    if dtype != torch.float16:
        grads[0].view(-1)[0] = 2e19  # its square is infinite
    residual, velocity, second = (torch.randn(n, device=device) for _ in range(3))
    second = second.abs()
    second[: n // 2] = 0
    residual[::3] = 0
    sent_in = torch.randint(5, (n,), device=device).to(torch.uint8)
    noted = sent_in.masked_fill(residual == 0, 3) if local else sent_in.clone()
    adaptive = kernels.Adaptive(second, 0.1, of_gradient, 1.5, 0.95, 0.05, 2.0, 1e-8, 0.75)
    flag = flag_on(device)
    expected = reference.accumulate_adaptive(grads, residual, velocity, 0.9, adaptive, noted != 3)
    mask = kernels.Mask(None, sent_in, 260)
    kernels.accumulate(grads, residual, velocity, flag, 0.9, adaptive=adaptive, mask=mask, residual_is_local=local)
    assert all(reference.same(*pair) for pair in zip((residual, velocity, second), expected, strict=True))
    assert torch.equal(sent_in, noted)
    assert flag.item() == (1 if n > 1 else 0)


@pytest.mark.parametrize("size", [1e38, 1e20, 1.8446745e19, 1.8446742e19, 1e-20, 1e-38, 0.0])
def test_the_square_of_an_extreme_gradient_spoils_nothing(device: torch.device, size: float) -> None:
    residual, velocity, second = (torch.zeros(100, device=device) for _ in range(3))
    sent_in = (torch.arange(100, device=device) % 2).to(torch.uint8)
    adaptive, mask = kernels.Adaptive(second, 0.1, 0.0, 1.0, 0.99, 0.01, 1.0, 1e-8, 1.0), kernels.Mask(None, sent_in, 1)
    for sign in (1, -1, 1):
        grad = torch.full((100,), sign * size, device=device)
        flag = flag_on(device)
        kernels.accumulate([grad], residual, velocity, flag, 0.9, adaptive=adaptive, mask=mask)
        assert all(array.isfinite().all() for array in (residual, velocity, second))
        assert residual.abs().max() <= 20  # some directions, whatever the gradient


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
