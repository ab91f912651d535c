"""The largest magnitude of every line, which accumulate notes on CPUs: takes find the same entries with it as without."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gradients
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from payload_arrays import flag_on, to_take
from torch import Tensor

from gradcomp.native import extension, kernels

CPU = torch.device("cpu")
SIZES = [[1], [3, 0, 5], [1000], [2047, 2049, 1, 70], [100_003], [64] * 200, [63, 1, 65, 127]]


def accumulated(grads: list[Tensor], momentum: float | None = None) -> tuple[Tensor, Tensor]:
    n = sum(grad.numel() for grad in grads)
    residual, peaks = torch.randn(n), kernels.peaks(n, CPU)
    assert peaks is not None
    velocity = None if momentum is None else torch.randn(n)
    moments = torch.zeros(len(grads), extension.MOMENTS, dtype=torch.float64)
    kernels.accumulate(grads, residual, velocity, flag_on(CPU), momentum or 0.0, moments=moments, peaks=peaks)
    return residual, peaks


@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", SIZES)
def test_peaks_are_their_definition(sizes: list[int], dtype: torch.dtype, momentum: float | None) -> None:
    residual, peaks = accumulated([gradients.draw("normal", n, seed).to(dtype) for seed, n in enumerate(sizes)], momentum)
    lines = torch.nn.functional.pad(residual.abs(), (0, -len(residual) % extension.LINE)).view(-1, extension.LINE)
    assert reference.same(peaks.view(torch.float32), lines.amax(1))


def test_peaks_of_more_gradients_than_one_launch_takes_say_nothing_wrong() -> None:
    residual, peaks = accumulated([torch.randn(100)] * (extension.MOST_PIECES + 1))
    assert (peaks == extension.UNKNOWN_PEAK).all()
    check_topk(residual, 77, peaks)


def check_take(take: Callable[..., None], residual: Tensor, arguments: Sequence[object], k: int, peaks: Tensor) -> None:
    told, untold = to_take(k), to_take(k)
    left = residual.clone()
    take(left, *arguments, **untold)
    take(residual, *arguments, **told, peaks=peaks)
    assert all(reference.same(told[name], untold[name]) for name in told) and reference.same(residual, left)


def check_topk(residual: Tensor, k: int, peaks: Tensor) -> None:
    check_take(kernels.take_topk, residual, [k], k, peaks)


@given(
    kind=gradients.kinds,
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 0),
    share=st.floats(0.0, 1.0),
    seed=gradients.seeds,
)
def test_takes_find_the_same_by_peaks(kind: str, sizes: list[int], share: float, seed: int) -> None:
    residual, peaks = accumulated([gradients.draw(kind, n, seed + i) for i, n in enumerate(sizes)])
    capacity = max(1, int(share**4 * len(residual)))
    check_topk(residual.clone(), capacity, peaks)
    scale = float(residual.abs().max())
    generator = torch.Generator().manual_seed(seed)
    layers = torch.tensor(sizes).cumsum(0).to(torch.int32), torch.rand(len(sizes), generator=generator) * scale
    check_take(kernels.take_above, residual, layers, capacity, peaks)


def test_a_gpu_has_no_use_for_them() -> None:
    assert kernels.peaks(100, torch.device("meta")) is None
