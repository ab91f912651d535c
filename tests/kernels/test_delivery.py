"""spread and add_back under a loss scale: the delivered update, the errors of casts, and the return of a failed step."""

from __future__ import annotations

import gradients
import pytest
import reference
import torch

from gradcomp.native import kernels

STEP = 7


@pytest.mark.parametrize("scale,loss_scale", [(1.0, None), (1.0, 1024.0), (3.0, None), (3.0, 2.0**-4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[1], [3, 0, 5], [2047, 2049, 1, 70], [64] * 300])
def test_the_residual_gets_the_errors_of_casts_and_in_a_failed_step_all(
    device: torch.device, sizes: list[int], dtype: torch.dtype, scale: float, loss_scale: float | None
) -> None:
    update = gradients.draw("normal", sum(sizes), 1).to(device)
    before = gradients.draw("laplace", sum(sizes), 2).to(device)
    residual = before.clone()
    grads = [torch.full((n,), 7.0, dtype=dtype, device=device) for n in sizes]
    verdicts = torch.zeros(2, dtype=torch.int32, device=device)  # on this bucket, and on another one
    scales = None if loss_scale is None else torch.tensor([loss_scale], device=device)
    kernels.spread(update, grads, scale, loss_scale=scales, residual=residual, verdict=verdicts[:1], step=STEP)
    factor = torch.tensor(scale * (loss_scale or 1.0))
    assert reference.same(torch.cat(grads).cpu(), torch.cat([(part * factor).to(dtype) for part in update.cpu().split(sizes)]))
    delivered = torch.cat(grads).double() / factor.item()
    if dtype == torch.float32:
        assert reference.same(residual, before)
    else:
        torch.testing.assert_close(residual + delivered, before.double() + update.double(), rtol=1e-6, atol=1e-6)
    assert not verdicts.any()

    kept = residual.clone()
    for verdict in (2 * STEP - 1, 2 * STEP, 2 * STEP + 1):  # the other bucket failed in the step before, or in this one
        residual.copy_(kept)
        verdicts[1] = verdict
        kernels.add_back(grads, residual, verdicts, 0, scale, loss_scale=scales, step=STEP)
        if verdict < 2 * STEP:
            assert reference.same(residual, kept)
        else:
            torch.testing.assert_close(residual, before + update, rtol=1e-6, atol=1e-6)
