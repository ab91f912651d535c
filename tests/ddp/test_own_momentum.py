"""momentum=auto under DDP: with everything sent, training is that of torch's own SGD."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import sgd_twin
import torch
import torch.distributed as dist
from sgd_twin import SETTINGS, SPEC, STEPS, Two, gradients
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.slow

RANKS = 2


def train(case: str, leaves: bool = False) -> list[Tensor]:
    """Train with known gradients. leaves: leave the momentum to the optimizer from the middle on, for three steps."""
    model = Two()
    wrapped = DistributedDataParallel(model)
    optimizer = sgd_twin.sgd(model, case)
    handle = gradcomp.ddp.attach(wrapped, SPEC, optimizer=optimizer)
    after_step = sgd_twin.schedule(case, optimizer)
    for step in range(STEPS):
        if leaves and step in (4, 7):
            handle.change(f"{SPEC},momentum=0" if step == 4 else SPEC)
        optimizer.zero_grad()
        wrapped(gradients(dist.get_rank(), step)).backward()
        optimizer.step()
        after_step()
    return [each.detach().clone() for each in model.parameters()]


def uneven(spec: str | None) -> list[Tensor]:
    """One rank has more batches than the other, which goes on exchanging without a step of its own."""
    model = Two()
    wrapped = DistributedDataParallel(model)
    optimizer = sgd_twin.sgd(model, "momentum alone")
    if spec is not None:
        gradcomp.ddp.attach(wrapped, spec, optimizer=optimizer)
    with wrapped.join():
        for step in range(6 + 3 * dist.get_rank()):
            optimizer.zero_grad()
            wrapped(gradients(dist.get_rank(), step)).backward()
            optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def program() -> dict[str, Any]:
    ranks.join()
    found: dict[str, Any] = {case: train(case) for case in SETTINGS}
    return found | {"uneven": (uneven(SPEC), uneven(None)), "left": train("nesterov", leaves=True)}


outcomes = ranks.once(lambda: ranks.launch(program, RANKS))


@pytest.mark.parametrize("case", SETTINGS)
def test_training_is_torchs_own(case: str) -> None:
    for found in outcomes():
        sgd_twin.check(found[case], case, RANKS)


def test_a_change_hands_the_momentum_back_and_takes_it_again() -> None:
    for found in outcomes():
        sgd_twin.check(found["left"], "nesterov", RANKS)


def test_a_rank_without_batches_exchanges_on() -> None:
    for found in outcomes():
        for own, wanted in zip(*found["uneven"], strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)
