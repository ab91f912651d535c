"""spread and add_back under a loss scale: the delivered update, the errors of casts, and the return of a failed step."""

from __future__ import annotations

import gradients
import pytest
import reference
import torch
from torch import Tensor

from gradcomp.native import kernels
from gradcomp.native.memory import Memory

SIZES = [[1], [3, 0, 5], [2047, 2049, 1, 70], [64] * 300]
TYPES = [torch.float32, torch.float16, torch.bfloat16]
SCALES = [(1.0, None), (1.0, 1024.0), (3.0, None), (3.0, 2.0**-4)]
STEP = 7

every_size = pytest.mark.parametrize("sizes", SIZES)
every_type = pytest.mark.parametrize("dtype", TYPES)
every_scale = pytest.mark.parametrize("scale,loss_scale", SCALES)


def one(value: float | None, device: torch.device) -> Tensor | None:
    return None if value is None else torch.tensor([value], device=device)


class Bucket:
    """A bucket's gradients, an update for them, its residual and the verdicts on it and another one."""

    def __init__(self, sizes: list[int], dtype: torch.dtype, device: torch.device):
        self.update = gradients.draw("normal", sum(sizes), 1).to(device)
        self.residual = gradients.draw("laplace", sum(sizes), 2).to(device)
        self.before = self.residual.clone()
        self.grads = [torch.full((n,), 7.0, dtype=dtype, device=device) for n in sizes]
        self.verdicts = torch.zeros(2, dtype=torch.int32, device=device)

    def deliver(self, scale: float = 1.0, loss_scale: Tensor | None = None) -> None:
        kernels.spread(
            self.update,
            self.grads,
            scale,
            loss_scale=loss_scale,
            residual=self.residual,
            verdict=self.verdicts[:1],
            step=STEP,
        )

    def add_back(self, scale: float = 1.0, loss_scale: Tensor | None = None, step: int = STEP) -> None:
        kernels.add_back(self.grads, self.residual, self.verdicts, 0, scale, loss_scale=loss_scale, step=step)

    @property
    def delivered(self) -> Tensor:
        return torch.cat([grad.double() for grad in self.grads])


@every_scale
@every_type
@every_size
def test_the_residual_gets_the_errors_of_casts(
    device: torch.device, sizes: list[int], dtype: torch.dtype, scale: float, loss_scale: float | None
) -> None:
    bucket = Bucket(sizes, dtype, device)
    bucket.deliver(scale, one(loss_scale, device))
    factor = torch.tensor(scale * (loss_scale or 1.0))
    wanted = torch.cat([(part * factor).to(dtype) for part in bucket.update.cpu().split(sizes)])
    assert reference.same(torch.cat(bucket.grads).cpu(), wanted)
    if dtype == torch.float32:
        assert reference.same(bucket.residual, bucket.before)
    else:
        there = bucket.residual.double() + bucket.delivered / factor.item()
        torch.testing.assert_close(there, bucket.before.double() + bucket.update.double(), rtol=1e-6, atol=1e-6)
    assert not bucket.verdicts.any()


@every_scale
@every_type
@every_size
def test_a_failed_step_is_taken_back(
    device: torch.device, sizes: list[int], dtype: torch.dtype, scale: float, loss_scale: float | None
) -> None:
    bucket = Bucket(sizes, dtype, device)
    bucket.deliver(scale, one(loss_scale, device))
    kept = bucket.residual.clone()
    bucket.verdicts[1] = 2 * STEP - 1  # the other bucket failed in the step before
    bucket.add_back(scale, one(loss_scale, device))
    assert reference.same(bucket.residual, kept)
    for verdict in (2 * STEP, 2 * STEP + 1):
        bucket.residual.copy_(kept)
        bucket.verdicts[1] = verdict
        bucket.add_back(scale, one(loss_scale, device))
        torch.testing.assert_close(bucket.residual, bucket.before + bucket.update, rtol=1e-6, atol=1e-6)


@every_type
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bucket_with_a_failed_exchange_keeps_its_residual(device: torch.device, dtype: torch.dtype, bad: float) -> None:
    bucket = Bucket([64] * 300, dtype, device)
    bucket.update[0] = bad
    bucket.deliver()
    bucket.add_back()
    assert reference.same(bucket.residual, bucket.before)
    assert bucket.verdicts.tolist() == [2 * STEP + 1, 0]


@pytest.mark.parametrize("where", [0, 77, 8191])
@pytest.mark.parametrize("dtype,update,loss_scale", [(torch.float16, 3.0, 2.0**15), (torch.float32, 1e36, 2.0**15)])
def test_an_entry_that_overflows_in_the_gradient_fails_the_step_and_waits(
    device: torch.device, dtype: torch.dtype, update: float, loss_scale: float, where: int
) -> None:
    bucket = Bucket([5000, 3192], dtype, device)
    bucket.update.clamp_(-1, 1)[where] = update
    bucket.deliver(1.0, one(loss_scale, device))
    assert bucket.delivered[where].isinf() and bucket.verdicts.tolist() == [2 * STEP, 0]
    bucket.add_back(1.0, one(loss_scale, device))
    torch.testing.assert_close(bucket.residual, bucket.before + bucket.update, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("clipped", [False, True])
@every_type
@every_size
def test_accumulate_divides_by_the_loss_scale(
    device: torch.device, sizes: list[int], dtype: torch.dtype, clipped: bool
) -> None:
    factors = torch.linspace(0.5, 2.0, len(sizes)) if clipped else torch.ones(len(sizes))
    grads = [gradients.draw("normal", n, seed).to(dtype) if n else torch.empty(0, dtype=dtype) for seed, n in enumerate(sizes)]
    residual = torch.zeros(sum(sizes), device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    scales = factors.to(device) if clipped else None
    kernels.accumulate(
        [grad.to(device) for grad in grads], residual, None, flag, scales=scales, loss_scale=one(2.0**10, device)
    )
    wanted = torch.cat([grad.float() * (factor / 2**10) for grad, factor in zip(grads, factors, strict=True)])
    assert reference.same(residual.cpu(), wanted)


@every_type
def test_lines_without_entries_deliver_zeros_under_an_infinite_scale(device: torch.device, dtype: torch.dtype) -> None:
    """An infinite factor times the zeros of a marked line is NaN; a line without entries delivers zeros."""
    sizes = [64, 2048, 5000]
    update = Memory().lend(sum(sizes), device)
    assert update.marks is not None
    update.marks[1] = 1
    grads = [torch.full((n,), 7.0, dtype=dtype, device=device) for n in sizes]
    kernels.spread(update.flat, grads, float("inf"), update.marks)
    delivered = torch.cat([grad.cpu() for grad in grads])
    assert delivered[64:128].isnan().all()
    assert not delivered[:64].any() and not delivered[128:].any()
