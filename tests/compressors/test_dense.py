"""dense: the exact mean."""

from __future__ import annotations

import torch

import gradcomp
from gradcomp.compressors.dense import Dense

PROMISED_BYTES = {"dense": lambda n: 4 * n}


def test_it_is_the_mean_and_leaves_nothing() -> None:
    simulation = gradcomp.Simulation("dense", {"a": (3, 2), "b": (5,)}, 4)
    grads = [{"a": torch.full((3, 2), float(rank)), "b": torch.arange(5.0) * rank} for rank in range(4)]
    update = simulation.step(grads)
    assert (update["a"] == 1.5).all()
    assert torch.equal(update["b"], torch.arange(5.0) * 1.5)
    assert all(not left.any() for rank in range(4) for left in simulation.residual(rank).values())


def test_it_needs_no_error_feedback() -> None:
    assert gradcomp.make("dense") == Dense()
