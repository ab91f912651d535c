"""momentum=auto under DDP: with everything sent, training is that of torch's own SGD."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import sgd_twin
import torch.distributed as dist
from sgd_twin import SETTINGS, SPEC, STEPS, Two, gradients
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.slow

RANKS = 2


def train(case: str) -> list[Tensor]:
    model = Two()
    wrapped = DistributedDataParallel(model)
    optimizer = sgd_twin.sgd(model, case)
    gradcomp.ddp.attach(wrapped, SPEC, optimizer=optimizer)
    after_step = sgd_twin.schedule(case, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(gradients(dist.get_rank(), step)).backward()
        optimizer.step()
        after_step()
    return [each.detach().clone() for each in model.parameters()]


def program() -> dict[str, Any]:
    ranks.join()
    return {case: train(case) for case in SETTINGS}


outcomes = ranks.once(lambda: ranks.launch(program, RANKS))


@pytest.mark.parametrize("case", SETTINGS)
def test_training_is_torchs_own(case: str) -> None:
    for found in outcomes():
        sgd_twin.check(found[case], case, RANKS)
