"""What changes updates before the optimizer's step is found, also where the largest layer's update holds only zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradcomp.engine.changed_gradients import UpdateSample
from gradcomp.engine.slots import ParameterSlot

SIZES = {"largest": 5000, "a": 30, "b": 20, "c": 10, "d": 5, "e": 3}


def updates(nonzero: str) -> dict[str, Tensor]:
    return {name: torch.ones(size) if name == nonzero else torch.zeros(size) for name, size in SIZES.items()}


@pytest.mark.parametrize("nonzero", SIZES)
def test_a_clip_is_found_in_some_steps(nonzero: str) -> None:
    slots = {name: ParameterSlot(name, nn.Parameter(torch.zeros(size))) for name, size in SIZES.items()}
    sample = UpdateSample([*slots.values()])
    for _ in range(8):
        delivered = updates(nonzero)
        for name, slot in slots.items():
            slot.parameter.grad = delivered[name]
        sample.keep(delivered, None)
        sample.check("direction")  # nothing has changed
        sample.keep(delivered, None)
        for slot in slots.values():
            assert slot.parameter.grad is not None
            slot.parameter.grad.mul_(0.5)
        try:
            sample.check("direction")
        except RuntimeError as error:
            assert "Adam's directions" in str(error)
            return
    pytest.fail("none of 8 steps has found it")
