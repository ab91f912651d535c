"""sign: the sign of each entry, and the mean magnitude of its group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from compressors.test_orq import rounded_bytes

import gradcomp

PROMISED_BYTES: dict[str, Callable[..., int]] = {
    "sign:group=64,route=allgather": rounded_bytes(64, 2, 1),
    "sign:group=128,route=alltoall": rounded_bytes(128, 2, 1, "alltoall"),
}


def test_signs_and_the_mean_magnitude() -> None:
    grad = torch.tensor([1.0, -2, 3, -6] * 16)
    simulation = gradcomp.Simulation("sign:group=64", {"w": (64,)}, 1)
    update = simulation.step([{"w": grad}])["w"]
    torch.testing.assert_close(update, 3 * grad.sign())
    torch.testing.assert_close(simulation.residual(0)["w"], grad - update)
