"""spread and add_back: the delivered update, and the return of a failed step."""

from __future__ import annotations

import gradients
import pytest
import reference
import torch

from gradcomp.native import kernels

STEP = 7


@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[1], [3, 0, 5], [2047, 2049, 1, 70], [64] * 300])
def test_a_failed_step_returns_what_was_delivered(
    device: torch.device, sizes: list[int], dtype: torch.dtype, scale: float
) -> None:
    update = gradients.draw("normal", sum(sizes), 1).to(device)
    before = gradients.draw("laplace", sum(sizes), 2).to(device)
    grads = [torch.full((n,), 7.0, dtype=dtype, device=device) for n in sizes]
    verdicts = torch.zeros(2, dtype=torch.int32, device=device)  # on this bucket, and on another one
    kernels.spread(update, grads, scale, verdict=verdicts[:1], step=STEP)
    delivered = torch.cat(grads).cpu()
    assert reference.same(delivered, torch.cat([(part * scale).to(dtype) for part in update.cpu().split(sizes)]))
    assert not verdicts.any()

    for verdict in (2 * STEP - 1, 2 * STEP, 2 * STEP + 1):  # the other bucket failed in the step before, or in this one
        residual = before.clone()
        verdicts[1] = verdict
        kernels.add_back(grads, residual, verdicts, 0, scale, step=STEP)
        if verdict < 2 * STEP:
            assert reference.same(residual, before)
        else:
            torch.testing.assert_close(residual.cpu(), before.cpu() + delivered.float() / scale, rtol=1e-6, atol=1e-6)
