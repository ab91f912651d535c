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


def test_the_density_follows_the_rate_from_its_highest_on() -> None:
    """A warm-up of the rate lowers what is sent in it, too. It is not taken for the highest rate."""
    w = torch.nn.Parameter(torch.zeros(N))
    optimizer = torch.optim.SGD([w], lr=0.1)
    simulation = gradcomp.Simulation(
        "sdagc:lr_revision=density,wire=exact", {"w": (N,)}, 1, optimizer=optimizer, named_parameters=[("w", w)]
    )
    sent = []
    for rate in (0.1, 1.0, 0.1):
        optimizer.param_groups[0]["lr"] = rate
        simulation.step([{"w": torch.randn(N, generator=torch.Generator().manual_seed(1))}])
        sent.append(simulation.bytes_sent[0])
    assert sent[0] == sent[1] and sent[2] == pytest.approx(sent[1] / 10, rel=0.02)


@pytest.mark.parametrize("density", [0.4, 0.6, 0.9])
@pytest.mark.parametrize("route", ["tree", "allgather", "split"])
def test_much_is_sent_dense(density: float, route: str) -> None:
    simulation = gradcomp.Simulation(f"sdagc:density={density},route={route}", {"w": (20_000,)}, 2)
    simulation.step([{"w": torch.randn(20_000)} for _ in range(2)])
    assert max(simulation.bytes_sent) <= 1.2 * 80_000  # a split's parts have slack


@pytest.mark.parametrize("density,of_freedom", [(0.6, 30.0), (0.3, 2.0), (0.01, 2.0)])
def test_a_share_far_from_the_usual_is_reached(density: float, of_freedom: float) -> None:
    """A threshold well below half a deviation, and tails so heavy that a deviation says little."""
    torch.manual_seed(0)
    simulation = gradcomp.Simulation(f"sdagc:density={density}", {"w": (N,)}, 1)
    drawn = torch.distributions.StudentT(of_freedom)
    sent = [int(simulation.step([{"w": drawn.sample((N,))}])["w"].count_nonzero()) for _ in range(60)]
    assert 0.85 < statistics.fmean(sent[30:]) / (density * N) < 1.1


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
