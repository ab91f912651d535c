"""qsgd: levels between minus and plus the norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compressors.test_orq import rounded_bytes

import gradcomp

PROMISED_BYTES: dict[str, Callable[..., int]] = {
    "qsgd:norm=max,levels=9,group=64,feedback=true,route=allgather": rounded_bytes(64, 9, 1),
}


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_levels_are_spread_over_the_norm(norm: str) -> None:
    torch.manual_seed(0)
    grad = torch.randn(64)
    top = float(grad.norm() if norm == "l2" else grad.abs().max())
    update = gradcomp.Simulation(f"qsgd:norm={norm},group=64", {"w": (64,)}, 1).step([{"w": grad}])["w"]
    steps = update / top * 2
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-5)
    assert not gradcomp.Simulation("qsgd", {"w": (64,)}, 1).step([{"w": torch.zeros(64)}])["w"].any()
