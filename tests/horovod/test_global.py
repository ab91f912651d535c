"""Algorithms that see the whole model, on real ranks, an odd number of them: what the simulator says, to the last bit."""

from __future__ import annotations

from typing import Any

import gradients
import pytest
import ranks
import reference
import torch

import gradcomp

pytestmark = pytest.mark.slow

N, STEPS, WORLD = 20_000, 3, 3
SENT = [
    "gtopk:ratio=0.01",
    "gtopk:ratio=0.01,faithful=true",
    "sketched_sgd:ratio=0.005",
    "sketched_sgd:ratio=0.005,candidates=0",
]
REDUCED = ["gs_sgd:ratio=0.005", "gs_sgd:ratio=0.005,sum=tree", "gs_sgd:ratio=0.005,candidates=0"]


@ranks.once
def found() -> list[dict[str, Any]]:
    return ranks.launch("horovod_global", WORLD, {"specs": SENT + REDUCED, "n": N, "steps": STEPS})


@pytest.mark.parametrize("spec", SENT + REDUCED)
def test_real_ranks_do_what_simulated_ones_do(spec: str) -> None:
    simulation = gradcomp.Simulation(spec, {"w": (N,)}, WORLD)
    for step in range(STEPS):
        update = simulation.step([{"w": gradients.draw("heavy", N, 100 * step + rank)} for rank in range(WORLD)])["w"]
        real = [rank[spec]["updates"][step] for rank in found()]
        assert all(reference.same(own, real[0]) for own in real)
        if spec in SENT:
            assert reference.same(real[0], update)
        else:
            torch.testing.assert_close(real[0], update, rtol=1e-4, atol=1e-4)  # a reduction adds in an order of its own
    assert [rank[spec]["bytes"] for rank in found()] == simulation.bytes_sent
