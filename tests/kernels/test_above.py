"""Statistics of layers, thresholds from them, and takes of the entries above them."""

from __future__ import annotations

import gradients
import pytest
import reference
import torch
from payload_arrays import flag_on, to_take
from torch import Tensor

from gradcomp.native import extension, kernels

SIZES = [[1], [3, 0, 5], [2047, 2049, 1, 70], [8192, 8192], [50_003], [64] * 300]


def moments_of(grads: list[Tensor]) -> Tensor:
    flat = torch.empty(sum(grad.numel() for grad in grads), device=grads[0].device)
    found = torch.full((len(grads), extension.MOMENTS), -7.0, dtype=torch.float64, device=flat.device)
    kernels.collect(grads, flat, flag_on(flat.device), moments=found)
    return found


def check_moments(found: Tensor, parts: list[Tensor]) -> None:
    for own, part in zip(found.tolist(), parts, strict=True):
        mean, squares, low, high, nonzero = reference.moments(part)
        size = max(abs(low), abs(high))
        assert own[2:] == [low, high, nonzero]
        # Both are sums in float32 over a few thousand entries at a time, measured from one of the entries.
        assert abs(own[0] - mean) <= 1e-6 * max(high - low, size * 1e-6) + 1e-44
        assert abs(own[1] - squares) <= 1e-5 * squares + 1e-12 * part.numel() * (high - low) ** 2 + 1e-30


FINITE_KINDS = [kind for kind in gradients.KINDS if kind not in ("huge", "tiny")]


@pytest.mark.parametrize(
    "sizes,kind",
    [*((sizes, kind) for sizes in SIZES[:-1] for kind in FINITE_KINDS), (SIZES[-1], "normal"), (SIZES[-1], "ties")],
)
def test_moments_are_their_definition(device: torch.device, sizes: list[int], kind: str) -> None:
    grads = [gradients.draw(kind, n, seed).to(device) for seed, n in enumerate(sizes)]
    check_moments(moments_of(grads), grads)


def test_moments_far_from_zero(device: torch.device) -> None:
    """The mean is ten million deviations: a difference of sums of squares would lose sigma."""
    grads = [(1e4 + 1e-3 * torch.randint(-3, 4, (9000,))).to(device)]
    (found,) = moments_of(grads).tolist()
    wanted = reference.moments(grads[0])
    assert abs(found[1] / wanted[1] - 1) < 1e-3
    assert abs(found[0] - wanted[0]) < 1e-5


def test_moments_are_those_of_halves_too(device: torch.device) -> None:
    grads = [torch.randn(3000, device=device), torch.randn(500, device=device).half()]
    check_moments(moments_of(grads), [grad.float() for grad in grads])


def threshold_of(x: Tensor, lam: float) -> float:
    moments = torch.tensor([reference.moments(x)], dtype=torch.float64)
    ends = torch.tensor([x.numel()], dtype=torch.int32)
    threshold = torch.zeros(1)
    kernels.set_thresholds(moments, ends, torch.tensor([lam]), threshold)
    return threshold.item()


def test_thresholds(device: torch.device) -> None:
    x = torch.randn(1000) + 0.5
    assert threshold_of(x, 2.0) == pytest.approx(2 * x.double().std(correction=0).item())
    x[::3] = 0
    used = x[x != 0].double()
    assert threshold_of(x, 1.0) == pytest.approx(used.std(correction=0).item())


@pytest.mark.parametrize("size", [1e19, 1e38, 3e38])
def test_entries_with_squares_that_overflow_pass(device: torch.device, size: float) -> None:
    """They pass wherever they are, and so they do not wait for ever."""
    for spikes in (slice(0, 5000), slice(7, 8), slice(0, 2500)):
        grad = torch.randn(5000)
        grad[spikes] = size * grad[spikes].sign()
        moments = moments_of([grad.to(device)])
        threshold = torch.zeros(1)
        ends = torch.tensor([5000], dtype=torch.int32)
        kernels.set_thresholds(moments.cpu(), ends, torch.tensor([16.0]), threshold)
        assert 0 < threshold.item() < size


def test_the_largest_entry_always_passes(device: torch.device) -> None:
    x = torch.tensor([1.0, -1.0, 1.0, -1.5])
    assert 1 < threshold_of(x, 3.3) < 1.5
    assert threshold_of(torch.zeros(5), 3.3) == 0.0
    assert threshold_of(torch.full((5,), 2.0), 3.3) == 0.0  # no deviation: everything passes


@pytest.mark.parametrize("layers", [1, 4, 256, 257, 700])
def test_pooled_layers_have_one_threshold(device: torch.device, layers: int) -> None:
    """Also where a block of threads has more than one round of layers."""
    sizes = [500, *((7 * i) % 40 for i in range(1, layers))]
    parts = [torch.randn(n) * (i % 5 + 1) + i / layers for i, n in enumerate(sizes)]
    moments = torch.tensor([reference.moments(part) for part in parts], dtype=torch.float64)
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    thresholds = torch.zeros(layers)
    kernels.set_thresholds(moments, ends, torch.tensor([2.0]), thresholds, pooled=True)
    whole = torch.cat(parts).double()
    assert thresholds.tolist() == pytest.approx([2 * whole.std(correction=0).item()] * layers)


def test_steering(device: torch.device) -> None:
    def steered(lam: float, count: int, target: int, gain: float = 0.1) -> list[float]:
        x = torch.tensor([lam, gain])
        kernels.steer(x, torch.tensor([count, 0], dtype=torch.int32), target)
        return [pytest.approx(value) for value in x.tolist()]

    assert steered(3.0, 100, 100) == [3.0, 0.1]
    assert steered(3.0, 10_000, 100) == steered(3.0, 200, 100) == [3.3, 0.1]
    assert steered(3.0, 0, 100, -0.1) == [3.0 / 1.1, -0.1]
    assert steered(3.0, 0, 100, 0.1) == [3.0 / 1.05, -0.05]  # on the other side: half the gain
    assert steered(3.0, 150, 100, -0.1) == [3.0 * 1.025, 0.05]
    assert steered(3.0, 200, 100, 0.04) == [3.15, 0.05]  # on the same side: a quarter more
    assert steered(3.0, 200, 100, -0.015) == [3.03, 0.01]
    assert steered(1024.0, 900, 1)[0] == 1024.0 and steered(2.0**-10, 0, 1)[0] == 2.0**-10


def test_steering_ends_at_the_target_where_a_tenth_more_is_far_too_much(device: torch.device) -> None:
    """Counts that fall by a factor of 100 over a tenth of lam, as a residual's do. Steering by a tenth swings for ever."""
    lam, target, counts = torch.tensor([3.0, 0.1]), 1000, []
    for _ in range(60):
        counts.append(round(target * 100 ** ((2.5 - lam[0].item()) / 0.25)))
        kernels.steer(lam, torch.tensor([counts[-1], 0], dtype=torch.int32), target)
    assert all(0.8 * target < count < 1.25 * target for count in counts[-30:]), counts


def check_above(residual: Tensor, sizes: list[int], thresholds: list[float], capacity: int) -> None:
    before, ages = residual.clone(), torch.arange(residual.numel(), device=residual.device).to(torch.uint8)
    wanted, passing = reference.above(before, sizes, thresholds, capacity)
    new_ages = ages.index_fill(0, wanted, 0)
    device, taken = residual.device, to_take(capacity, residual.device)
    layers = torch.tensor(sizes).cumsum(0).to(torch.int32).to(device), torch.tensor(thresholds, device=device)
    kernels.take_above(residual, *layers, **taken, ages=ages)
    assert taken["header"].tolist() == [passing, 0]
    assert torch.equal(taken["indices"][: wanted.numel()].long(), wanted)
    assert reference.same(taken["values"][: wanted.numel()], before[wanted])
    left = before.clone()
    left[wanted] = 0
    assert reference.same(residual, left) and torch.equal(ages, new_ages)


@pytest.mark.parametrize("kind", gradients.KINDS)
@pytest.mark.parametrize("n,capacity", [(1, 1), (1000, 1), (4096, 4096), (65_537, 66), (100_000, 30_000)])
def test_above_is_exact(device: torch.device, kind: str, n: int, capacity: int) -> None:
    residual = gradients.draw(kind, n, seed=n + capacity).to(device)
    sigma = float(residual.double().std(correction=0))
    for lam in (0.0, 1.0, 3.0, float("inf")):
        check_above(residual.clone(), [n], [lam * sigma if lam else 0.0], capacity)


@pytest.mark.parametrize("n, count, steps", gradients.CLOSE)
def test_above_of_close_entries(device: torch.device, n: int, count: int, steps: int) -> None:
    check_above(gradients.close(n, count, steps).to(device), [n], [0.5], count // 2)


def test_thousands_of_tiny_layers(device: torch.device) -> None:
    sizes = [i % 5 for i in range(5000)]
    residual = torch.randn(sum(sizes), device=device)
    check_above(residual, sizes, [float(i % 3) for i in range(5000)], 3000)
