"""flatten, accumulate and spread: gradients in, updates out."""

from __future__ import annotations

import gradients
import pytest
import reference
import torch
from payload_arrays import entries, flag_on
from torch import Tensor

from gradcomp.native import kernels
from gradcomp.native.extension import MOMENTS
from gradcomp.native.memory import Memory

SIZES = [[1], [3, 0, 5], [1000], [2047, 2049, 1, 70], [100_003], [64] * 300]
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
@pytest.mark.parametrize("of_residual", [0.0, 0.3, 4.0, 1e30])
def test_the_old_residual_has_a_factor(device: torch.device, of_residual: float, momentum: float | None) -> None:
    """It acts where a gradient is refused, too, and nothing becomes infinite."""
    grads = pieces([100, 4000], torch.float32, device)
    grads[1][7] = torch.inf
    residual = torch.randn(4100, device=device)
    residual[:9] *= 1e37
    velocity = None if momentum is None else torch.randn(4100, device=device)
    flag = flag_on(device)
    expected = reference.accumulate(grads, residual, velocity, momentum or 0.0, False, of_residual)
    kernels.accumulate(grads, residual, velocity, flag, momentum or 0.0, of_residual=of_residual)
    assert reference.same(residual, expected[0]) and residual.isfinite().all() and flag.item() == 1
    assert velocity is None or reference.same(velocity, expected[1])
    with pytest.raises(ValueError, match=r"accumulate: of_residual=-1 must be at least 0"):
        kernels.accumulate(grads, residual, velocity, flag, momentum or 0.0, of_residual=-1.0)


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


@pytest.mark.parametrize("step", [1, 2, 256, 257, 1000])
@pytest.mark.parametrize("sizes", SIZES)
def test_empty_entries_are_noted_as_sent_in_the_step_before(device: torch.device, sizes: list[int], step: int) -> None:
    n = sum(sizes)
    sent_in = torch.randint(256, (n + 1,), device=device).to(torch.uint8)[1:]  # off a word's boundary
    residual, velocity = torch.randn(n, device=device), torch.randn(n, device=device)
    residual[::5] = 0
    grads, flag = pieces(sizes, torch.float32, device), flag_on(device)
    expected = reference.accumulate(grads, residual, velocity, 0.9, False)
    noted = sent_in.masked_fill(residual == 0, (step - 1) % 256)
    kernels.accumulate(grads, residual, velocity, flag, 0.9, mask=kernels.Mask(velocity, sent_in, step))
    assert torch.equal(sent_in, noted) and reference.same(residual, expected[0])


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


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("with_velocity", [False, True])
@pytest.mark.parametrize("with_moments", [False, True])
@pytest.mark.parametrize("where", [0, 4999, 9999])
def test_an_entry_that_is_not_finite_raises_the_flag_and_stays_out(
    device: torch.device, bad: float, with_velocity: bool, with_moments: bool, where: int
) -> None:
    grads = [torch.randn(5000, device=device), torch.randn(5000, device=device)]
    grads[where // 5000][where % 5000] = bad
    residual = torch.randn(10_000, device=device)
    velocity = torch.randn(10_000, device=device) if with_velocity else None
    flag = flag_on(device)
    expected = reference.accumulate(grads, residual, velocity, 0.5 if with_velocity else 0.0, False)
    old = residual[where].item()
    moments = torch.zeros(2, MOMENTS, dtype=torch.float64, device=device) if with_moments else None
    momentum = 0.5 if with_velocity else 0.0
    kernels.accumulate(grads, residual, velocity, flag, momentum, moments=moments, memory=Memory())
    assert flag.item() == 1
    assert reference.same(residual, expected[0])
    assert residual[where].item() == old
    assert residual.isfinite().all()


@pytest.mark.parametrize("momentum,nesterov", [(None, False), (0.9, False), (0.9, True)])
def test_a_sum_beyond_the_largest_becomes_the_largest(device: torch.device, momentum: float | None, nesterov: bool) -> None:
    """No finite gradient is refused, now or later: an entry that waits at the largest magnitude leaves it again."""
    drawn = gradients.draw("normal", 5000, seed=1)
    residual, velocity = torch.zeros(5000, device=device), None if momentum is None else torch.zeros(5000, device=device)
    flag = flag_on(device)
    for size in (3e38, 3e38, 1e37, 1.0, -1.0, -3e38, -3.4e38):
        grad = (size * drawn.sign()).to(device)
        expected = reference.accumulate([grad], residual, velocity, momentum or 0.0, nesterov)
        kernels.accumulate([grad], residual, velocity, flag, momentum or 0.0, nesterov)
        assert flag.item() == 0
        assert reference.same(residual, expected[0])
        assert velocity is None or (expected[1] is not None and reference.same(velocity, expected[1]))
        assert residual.abs().max() <= reference.LARGEST
    if velocity is None:
        assert (residual.abs() < 3.2e38).all()


@pytest.mark.parametrize("scale", [1.0, 4.0, 1 / 3])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_spread_scales_casts_and_cuts(device: torch.device, sizes: list[int], dtype: torch.dtype, scale: float) -> None:
    flat = torch.randn(sum(sizes), device=device) * 1000
    flat[:1] = float("nan")
    outs = [torch.zeros(n, dtype=dtype, device=device) for n in sizes]
    kernels.spread(flat, outs, scale)
    factor = torch.tensor(scale, device=device)  # in float32, as the kernel has it
    for out, part in zip(outs, flat.split(sizes), strict=True):
        wanted = (part * factor).to(dtype)
        assert torch.equal(out.isnan(), wanted.isnan())
        assert reference.same(out.nan_to_num(), wanted.nan_to_num())


def test_pieces_of_several_types_and_alignments(device: torch.device) -> None:
    """Gradients may begin one, two or three entries off a vector's boundary."""
    base = torch.randn(4 * 1003, device=device)
    grads = [base[1:1001], base[1003:2005].to(torch.bfloat16)[1:], base[2010:2013], base[2013:4000].half()[3:]]
    flat = torch.empty(sum(g.numel() for g in grads) + 3, device=device)[3:]
    kernels.flatten(grads, flat)
    assert reference.same(flat, reference.flatten(grads))
    outs = [torch.zeros(g.numel() + 1, dtype=g.dtype, device=device)[1:] for g in grads]
    kernels.spread(flat, outs)
    for out, grad in zip(outs, grads, strict=True):
        assert reference.same(out, grad)


def test_all_half_patterns_come_through(device: torch.device) -> None:
    patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).to(device)
    for dtype in (torch.float16, torch.bfloat16):
        halves = patterns.view(dtype)
        flat = torch.empty(halves.numel(), device=device)
        kernels.flatten([halves], flat)
        good = ~halves.isnan()
        assert torch.equal(flat[good], halves[good].float())
        assert flat[~good].isnan().all()


def test_rounding_to_half_types_is_to_nearest_even(device: torch.device) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int64).to(torch.int32).to(device)
    edges = torch.tensor(
        [65504.0, 65519.9, 65520.0, 6e-8, 2.98e-8, 2.9803e-8, 6.1e-5, 6.0976e-5, 0.0, -0.0, 1e-45, 3.4e38], device=device
    )
    flat = torch.cat([bits.view(torch.float32).nan_to_num(), edges, -edges])
    for dtype in (torch.float16, torch.bfloat16):
        out = torch.empty(flat.numel(), dtype=dtype, device=device)
        kernels.spread(flat, [out])
        assert reference.same(out, flat.to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", [*SIZES, [1, 63, 64, 65, 129, 4_300_000]])
def test_a_sparse_update_is_spread_as_if_all_of_it_were_read(
    device: torch.device, sizes: list[int], dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    n = sum(sizes)
    if n > 2**20 and "simt" in request.node.name:
        sizes = [1, 63, 64, 65, 129, 9000]
        n = sum(sizes)
    places = torch.randperm(n)[:50].sort().values.tolist()
    payload = entries(torch.randn(len(places)).tolist(), places, count=50, device=device)
    dense, memory = torch.zeros(n, device=device), Memory()
    for attempt in range(2):  # the second time in the first one's memory, which was wiped
        update = memory.lend(n, device)
        assert not update.flat.any()
        for target, marks in ((update.flat, update.marks), (dense.zero_(), None)):
            kernels.add_sparse(target, **payload, marks=marks)
            kernels.add_sparse(target, **payload, scale=0.5, marks=marks)
            if attempt:
                kernels.add_sparse(target, **entries([1.0], [0], count=-1, device=device), marks=marks)
        ours, wanted = ([torch.full((size,), 7.0, dtype=dtype, device=device) for size in sizes] for _ in range(2))
        kernels.spread(update.flat, ours, 0.25, update.marks)
        memory.give_back(update)
        kernels.spread(dense, wanted, 0.25)
        for own, other in zip(ours, wanted, strict=True):
            assert torch.equal(own.isnan(), other.isnan())
            assert reference.same(own.nan_to_num(), other.nan_to_num())


def test_a_sparse_update_that_was_never_given_back_is_clean_the_next_time(device: torch.device) -> None:
    memory = Memory()
    update = memory.lend(1000, device)
    kernels.add_sparse(update.flat, **entries([1.0], [7], device=device), marks=update.marks)
    assert update.flat[7] == 1
    assert not memory.lend(2000, device).flat.any()
    assert not memory.lend(1000, device).flat.any()
