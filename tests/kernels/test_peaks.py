"""The largest magnitude of every line, which accumulate notes on CPUs: takes that are told it find the same entries."""

from __future__ import annotations

import gradients
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradcomp.native import extension, kernels

CPU = torch.device("cpu")
SIZES = [[1], [3, 0, 5], [1000], [2047, 2049, 1, 70], [100_003], [64] * 200, [63, 1, 65, 127]]


def accumulated(grads: list[Tensor], momentum: float | None = None) -> tuple[Tensor, Tensor]:
    n = sum(grad.numel() for grad in grads)
    value, peaks = torch.randn(n), kernels.peaks(n, CPU)
    assert peaks is not None
    velocity = None if momentum is None else torch.randn(n)
    flag = torch.zeros(1, dtype=torch.int32)
    moments = torch.zeros(len(grads), extension.MOMENTS, dtype=torch.float64)
    kernels.accumulate(grads, value, velocity, flag, momentum or 0.0, moments=moments, peaks=peaks)
    return value, peaks


@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", SIZES)
def test_peaks_are_their_definition(sizes: list[int], dtype: torch.dtype, momentum: float | None) -> None:
    value, peaks = accumulated([gradients.draw("normal", n, seed).to(dtype) for seed, n in enumerate(sizes)], momentum)
    lines = torch.nn.functional.pad(value.abs(), (0, -len(value) % extension.LINE)).view(-1, extension.LINE)
    assert reference.same(peaks.view(torch.float32), lines.amax(1))


def test_peaks_of_more_gradients_than_one_launch_takes_say_nothing_wrong() -> None:
    value, peaks = accumulated([torch.randn(100)] * (extension.MOST_PIECES + 1))
    assert (peaks == extension.UNKNOWN_PEAK).all()
    check_topk(value, 77, peaks)


def taken(room: int) -> dict[str, Tensor]:
    return {
        "values": torch.zeros(room),
        "indices": torch.zeros(room, dtype=torch.int32),
        "header": torch.zeros(2, dtype=torch.int32),
    }


def check_topk(value: Tensor, k: int, peaks: Tensor) -> None:
    told, untold = taken(k), taken(k)
    left = value.clone()
    kernels.take_topk(left, k, **untold)
    kernels.take_topk(value, k, **told, peaks=peaks)
    assert all(reference.same(told[name], untold[name]) for name in told) and reference.same(value, left)


@given(
    kind=gradients.kinds,
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 0),
    share=st.floats(0.0, 1.0),
    seed=gradients.seeds,
)
def test_takes_find_the_same_by_peaks(kind: str, sizes: list[int], share: float, seed: int) -> None:
    value, peaks = accumulated([gradients.draw(kind, n, seed + i) for i, n in enumerate(sizes)])
    room = max(1, int(share**4 * len(value)))
    check_topk(value.clone(), room, peaks)
    scale = float(value.abs().max())
    generator = torch.Generator().manual_seed(seed)
    layers = (
        torch.tensor(sizes).cumsum(0).to(torch.int32),
        torch.randn(len(sizes), generator=generator) * 0.1 * scale,
        torch.rand(len(sizes), generator=generator) * scale,
    )
    told, untold = taken(room), taken(room)
    left = value.clone()
    kernels.take_above(left, *layers, **untold)
    kernels.take_above(value, *layers, **told, peaks=peaks)
    assert all(reference.same(told[name], untold[name]) for name in told) and reference.same(value, left)


def test_a_gpu_has_no_use_for_them() -> None:
    assert kernels.peaks(100, torch.device("meta")) is None
