"""What changes updates before the optimizer's step is found, also where the largest layer's update holds only zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradcomp.engine.bucket import Bucket
from gradcomp.engine.optimizers.delivered_sample import DeliveredSample
from gradcomp.engine.parameters import Slot
from gradcomp.engine.plan import plan
from gradcomp.spec import make

SIZES = {"largest": 5000, "a": 30, "b": 20, "c": 10, "d": 5, "e": 3}


def updates(nonzero: str) -> dict[str, Tensor]:
    return {name: torch.ones(size) if name == nonzero else torch.zeros(size) for name, size in SIZES.items()}


@pytest.mark.parametrize("nonzero", SIZES)
def test_a_clip_is_found_in_some_steps(nonzero: str) -> None:
    slots = {name: Slot(name, nn.Parameter(torch.zeros(size))) for name, size in SIZES.items()}
    (planned,) = plan({name: slot.layer for name, slot in slots.items()}, 25, make("topk"))
    bucket = Bucket(0, *planned, seed=0)
    sample = DeliveredSample(slots)
    for _ in range(8):
        bucket.grads = updates(nonzero)
        for name, slot in slots.items():
            slot.parameter.grad = bucket.grads[name]
        sample.keep([bucket], None)
        sample.check("direction")  # nothing has changed
        sample.keep([bucket], None)
        for slot in slots.values():
            assert slot.parameter.grad is not None
            slot.parameter.grad.mul_(0.5)
        try:
            sample.check("direction")
        except RuntimeError as error:
            assert "Adam's directions" in str(error)
            return
    pytest.fail("none of 8 steps has found it")
