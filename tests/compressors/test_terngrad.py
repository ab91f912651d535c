"""terngrad: three levels, the largest of them the largest magnitude after clipping."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compressors.test_orq import rounded_bytes

import gradcomp
from gradcomp.compressors.terngrad import TernGrad

PROMISED_BYTES: dict[str, Callable[..., int]] = {
    "terngrad:sigmas=1.2,feedback=true,group=64,route=allgather": rounded_bytes(64, 3, 1),
}


def test_it_is_clipped_at_deviations_of_the_layer() -> None:
    torch.manual_seed(0)
    grad = torch.randn(4096)
    grad[7] = 100.0
    update = gradcomp.Simulation("terngrad:group=4096", {"w": (4096,)}, 1).step([{"w": grad}])["w"]
    assert set(update.sign().tolist()) == {-1, 0, 1}
    assert float(update.abs().max()) == pytest.approx(2.5 * float(grad.std(correction=0)), rel=1e-3)
    assert TernGrad(sigmas=0).unbiased and not TernGrad().unbiased
