"""Where entries may wait: with optimizers whose momentum the exchange takes over, or that have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from gradcomp.engine.optimizers.own_momentum import OwnMomentum

LEFT = "without moments that the exchange takes over"


@pytest.mark.parametrize(
    ("make", "bears", "named"),
    [
        (lambda params: SGD(params, 0.1, momentum=0.9), True, "moments of SGD"),
        (lambda params: SGD(params, 0.1), True, "without momentum"),
        (lambda params: torch.optim.AdamW(params), True, "moments of Adam"),
        (lambda params: SGD(params, 0.1, momentum=0.9, dampening=0.1), False, LEFT),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), False, LEFT),
        (lambda params: torch.optim.RMSprop(params), False, LEFT),
        (lambda params: SGD([*params, nn.Parameter(torch.ones(1))], 0.1), False, LEFT),
        (lambda params: None, False, LEFT),
    ],
)
def test_where_entries_may_wait(make: Any, bears: bool, named: str) -> None:
    """auto offers ways with a residual only there, and ranks that differ are told so."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = make([parameter])
    momentum = OwnMomentum(lambda: optimizer, {"w": parameter}, lambda name, tensor: tensor.view(-1))
    assert momentum.bears_waiting == bears and momentum.describe() == named
