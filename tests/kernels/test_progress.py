"""offer_progress and deliver_progress: what a step did to the weights out of them, and the mean update into them."""

from __future__ import annotations

import gradients
import pytest
import reference
import torch
from payload_arrays import flag_on
from torch import Tensor

from gradcomp.native import extension, kernels
from gradcomp.native.extension import LINE

SIZES = [[1], [3, 0, 5], [2047, 2049, 1, 70], [8192, 17_000, 4096], [64] * 300]
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def a_step(sizes: list[int], dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Make the weights after a step, a flat copy of those before it, and those themselves."""
    before = [gradients.draw("normal", max(n, 1), seed)[:n].to(dtype).to(device) for seed, n in enumerate(sizes)]
    after = [weight - 0.1 * torch.randn(len(weight), device=device).to(dtype) for weight in before]
    return after, reference.flatten(before), before


def falling_shares(device: torch.device) -> Tensor:
    """The share of what waits grows with its age, and that of what is new falls."""
    grown = 1 - 0.99 ** torch.arange(256.0)
    return torch.cat([grown, 0.5 - grown / 2]).to(device)


def whole_share(device: torch.device, share: float = 1.0) -> Tensor:
    return torch.cat([torch.full((256,), share), torch.zeros(256)]).to(device)


def all_same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(reference.same(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(found, wanted, strict=True))


def launches(sizes: list[int]) -> list[tuple[slice, slice]]:
    """Split pieces into those of each launch, and their entries."""
    ends = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    firsts = range(0, len(sizes), extension.MOST_PIECES)
    return [
        (slice(first, first + extension.MOST_PIECES), slice(ends[first], ends[min(first + extension.MOST_PIECES, len(sizes))]))
        for first in firsts
    ]


def test_more_weights_than_one_launch_takes_are_offered_as_one_would_be(device: torch.device) -> None:
    """To the bit as in calls of their own, but for the flag, which is of all."""
    count = 2 * extension.MOST_PIECES + 3
    sizes = [1 + i % 7 for i in range(count)]
    weights, start, before = a_step(sizes, torch.float32, device)
    n = len(start)
    weights[300][0] = torch.nan  # in the second launch of three
    residual, ages = torch.randn(n, device=device), torch.randint(256, (n,), device=device).to(torch.uint8)
    decays, shares, apart = torch.rand(count, device=device), falling_shares(device), []
    for part, at in launches(sizes):
        own = [start[at].clone(), residual[at].clone(), ages[at].clone()]
        moved = [weight.clone() for weight in weights[part]]
        kernels.offer_progress(moved, *own, shares, flag_on(device), decays=decays[part].clone(), factor=0.5)
        apart.append(own)
    moments, flag = torch.zeros(count, 5, dtype=torch.float64, device=device), flag_on(device)
    options = {"decays": decays, "factor": 0.5, "moments": moments}
    kernels.offer_progress(weights, start, residual, ages, shares, flag, **options)
    for found, parts in zip((start, residual, ages), zip(*apart, strict=True), strict=True):
        assert reference.same(found, torch.cat(parts))
    assert all_same(weights, before) and flag.item() == 1
    ends = torch.tensor([[part.min(), part.max()] for part in start.split(sizes)], dtype=torch.float64)
    assert torch.equal(moments[:, 2:4].cpu(), ends)


def an_update(n: int, device: torch.device, density: float) -> tuple[Tensor, Tensor]:
    """Make an update with entries in some lines only, and its marks."""
    marks = (torch.rand(-(-n // LINE), device=device) < density).to(torch.uint8)
    update = torch.randn(n, device=device) * 0.1 * (torch.rand(n, device=device) < 0.7)
    return torch.where(marks.repeat_interleave(LINE)[:n] != 0, update, 0), marks


def test_lines_without_a_mark_are_not_read_and_their_weights_not_written(device: torch.device) -> None:
    """Also of an update's NaNs, where the weights hold patterns that no cast makes."""
    n = 64 * LINE
    marks = torch.arange(64, device=device).remainder(3).eq(0).to(torch.uint8)
    marked = marks.repeat_interleave(LINE) != 0
    for dtype, pattern in ((torch.float16, 0x7D01), (torch.bfloat16, 0x7F81)):
        update = torch.where(marked, 1.0, torch.nan)
        weights = torch.full((n,), pattern, dtype=torch.int16, device=device).view(dtype)
        rest, residual = torch.ones(n, device=device), torch.ones(n, device=device)
        kernels.deliver_progress(update, [weights], rest, residual, 1.0, marks)
        assert (weights.view(torch.int16)[~marked] == pattern).all() and (residual == 2).all()


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("count", [4, 300])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_failed_exchange_spoils_the_first_entry_of_every_weight(
    device: torch.device, dtype: torch.dtype, count: int, marked: bool
) -> None:
    sizes = [0, 4097, 0, 70, *[13] * (count - 4)]
    _, rest, weights = a_step(sizes, dtype, device)
    update, marks = an_update(len(rest), device, 0.3)
    update[0], marks[0] = torch.nan, 1
    residual, before = torch.randn(len(rest), device=device), [weight.clone() for weight in weights]
    wanted = (residual + rest).clamp(-reference.LARGEST, reference.LARGEST)
    kernels.deliver_progress(update, weights, rest, residual, 1.0, marks if marked else None)
    assert reference.same(residual, wanted)  # no rounding
    moved = [(old.float() - part).to(dtype) for old, part in zip(before, update.split(sizes), strict=True)]
    for weight in moved:
        weight[:1] = torch.nan
    assert all_same(weights, moved)


def test_more_weights_than_one_launch_takes_are_delivered_as_one_would_be(device: torch.device) -> None:
    sizes = [1 + i % 7 for i in range(2 * extension.MOST_PIECES + 3)]
    _, rest, weights = a_step(sizes, torch.bfloat16, device)
    update, marks = an_update(len(rest), device, 0.5)
    residual = torch.randn(len(rest), device=device)
    apart, left = [weight.clone() for weight in weights], residual.clone()
    for part, at in launches(sizes):
        kernels.deliver_progress(update[at].clone(), apart[part], rest[at], left[at])
    kernels.deliver_progress(update, weights, rest, residual, 1.0, marks)
    assert all_same(weights, apart) and reference.same(residual, left)


def test_a_step_of_which_everything_travels_is_the_optimizers_own(device: torch.device) -> None:
    """But for a rounding: start - (start - weight) is not always the weight to the last bit."""
    weights, start, _ = a_step([5000, 70], torch.float32, device)
    own, residual = [weight.clone() for weight in weights], torch.zeros(5070, device=device)
    kernels.offer_progress(weights, start, residual, None, whole_share(device), flag_on(device))
    update, rest = start.clone(), torch.zeros_like(start)
    kernels.deliver_progress(update, weights, rest, residual)
    torch.testing.assert_close(weights, own, rtol=0, atol=2.0**-22)
    assert not residual.any()
