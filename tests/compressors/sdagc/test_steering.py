"""Steering of lam: a bucket sends the share of its entries that the knob density names, and no more than 1.1 times as many."""

from __future__ import annotations

import statistics

import pytest
import torch

import gradcomp

N = 200_000


@pytest.mark.parametrize("wanted", [0.02, 0.001])
@pytest.mark.parametrize("louder", [1, 2])
def test_a_bucket_sends_its_share(wanted: float, louder: int) -> None:
    """Also where gradients double and halve every 20 steps. The largest waiting entries are nearly equal."""
    simulation = gradcomp.Simulation(f"sdagc:density={wanted},wire=exact", {"w": (500, 400)}, 2)
    shares = []
    for step in range(120):
        torch.manual_seed(step)
        grads = [torch.randn(500, 400) * (louder if step // 20 % 2 else 1) for _ in range(2)]
        before = simulation.residual(0)["w"].clone()
        simulation.step([{"w": grad} for grad in grads])
        taken = (simulation.residual(0)["w"] != before + grads[0]).sum().item()
        shares.append(taken / (wanted * N))
        assert simulation.bytes_sent[0] < 8 * 1.1 * wanted * N + 200
    assert 0.9 < statistics.fmean(shares[30:]) < 1.1
    assert min(shares[30:]) > (0.7 if louder == 1 else 0.25) and max(shares) < 1.11


def test_a_change_of_density_begins_anew() -> None:
    simulation = gradcomp.Simulation("sdagc:density=0.02", {"w": (500, 400)}, 1)
    for step in range(3):
        torch.manual_seed(step)
        simulation.step([{"w": torch.randn(500, 400)}])
    simulation.change("sdagc:density=0.001")
    for step in range(40):
        torch.manual_seed(100 + step)
        sent = int(simulation.step([{"w": torch.randn(500, 400)}])["w"].count_nonzero())
    assert 0.5 * 0.001 * N < sent < 1.1 * 0.001 * N + 1
