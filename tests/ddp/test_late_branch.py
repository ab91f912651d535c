"""A branch of a model that trains late under DDP: Adam counts its steps from the first that uses it, as torch does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.usefixtures("group_of_one")


class Branches(nn.Module):
    """Two layers, of which the first is used where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.always = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        always: Tensor = self.always(x)
        return always + self.late(x) if late else always


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_a_branch_that_is_first_used_late_does_not_run_away(gradient_as_bucket_view: bool, kind: Any) -> None:
    """Adam decays weights within gradients, which have a loss scale here."""
    moved: list[list[Tensor]] = []
    for spec in ("topk:ratio=1,wire=exact,momentum=0", None):
        torch.manual_seed(1)
        model = Branches()
        optimizer, scaler = (
            kind(model.parameters(), 0.01, weight_decay=0.1),
            torch.amp.GradScaler("cpu", 2.0**9, growth_interval=5),
        )
        wrapped = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=gradient_as_bucket_view)
        if spec is not None:
            gradcomp.ddp.attach(wrapped, spec, optimizer=optimizer, scaler=scaler)
        generator = torch.Generator().manual_seed(2)
        for step in range(26):
            optimizer.zero_grad()
            loss = wrapped(torch.randn(8, 4, generator=generator), step >= 20).square().mean()
            scaler.scale(loss * (math.inf if step in (3, 21) else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        moved.append([each.detach() for each in model.parameters()])
    for ours, theirs in zip(*moved, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
