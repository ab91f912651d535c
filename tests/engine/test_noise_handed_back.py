"""Adam's second moments change hands: with other noise in them than before, steps keep their length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradcomp

ENTRIES, STEPS, LATER, SIGNAL = 4096, 60, 10, 0.3


def gradients(step: int, ranks: int) -> list[Tensor]:
    """Draw gradients of 0.3 signal, which all ranks share, and 1 noise."""
    signal = torch.randn(ENTRIES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + step)
    return [SIGNAL * signal + torch.randn(ENTRIES, generator=generator) for _ in range(ranks)]


def lengths(ranks: int, spec: str | None, first: int = 0, last: int = STEPS) -> list[float]:
    """Return how far each step moves the weights.

    With a spec, gradcomp has the moments from step `first` on, and the optimizer gets them back in step `last`.
    """
    weights = nn.Parameter(torch.zeros(ENTRIES))
    optimizer = torch.optim.AdamW([weights], 0.01, weight_decay=0.0)
    simulation = None
    found = []
    for step in range(STEPS + LATER):
        drawn, before = gradients(step, ranks), weights.detach().clone()
        if spec is not None and step == first:
            named = [("w", weights)]
            simulation = gradcomp.Simulation(spec, {"w": (ENTRIES,)}, ranks, optimizer=optimizer, named_parameters=named)
        if simulation is not None and step == last:
            simulation.change("dense:momentum=0")
        update = torch.stack(drawn).mean(0) if simulation is None else simulation.step([{"w": each} for each in drawn])["w"]
        weights.grad = update.clone()
        optimizer.step()
        found.append(float((weights.detach() - before).norm()))
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_steps_are_as_long_as_torchs_own(ranks: int) -> None:
    """With the ranks' own second moments they had 0.76, 0.60 and 0.49 of the length."""
    ours, theirs = lengths(ranks, "topk:ratio=1,wire=exact"), lengths(ranks, None)
    for part in (slice(STEPS - 10, STEPS), slice(STEPS, STEPS + LATER)):
        assert sum(ours[part]) / sum(theirs[part]) == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_steps_keep_their_length_where_torchs_moments_are_taken_over(ranks: int) -> None:
    """What they hold is of the mean gradient. From the first comparison on, steps had 1.3, 1.6 and 2 times the length."""
    ours, theirs = lengths(ranks, "topk:ratio=1,wire=exact", first=20, last=10**6), lengths(ranks, None)
    for begin in range(33, STEPS + LATER - 9, 9):
        part = slice(begin, begin + 9)
        assert sum(ours[part]) / sum(theirs[part]) == pytest.approx(1, abs=0.12), begin
