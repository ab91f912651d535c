"""Groups of Horovod's that a pass leaves incomplete: the exchange then begins in step()."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import ranks
import torch
from doors import ALONE, DOORS, Training
from torch import Tensor, nn

pytestmark = pytest.mark.slow


class Layers(nn.Module):
    """A model with a layer that is never used, and one that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.never, self.some, self.last = nn.Linear(8, 16), nn.Linear(4, 4), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        hidden = self.first(x).relu()
        result: Tensor = self.last(self.some(hidden) if uses else hidden)
        return result


def trained(door: str, spec: str | None) -> Tensor:
    run = Training(door, Layers(), spec, lr=0.01, momentum=0.9, groups=1)
    draws = torch.Generator().manual_seed(hvd.rank())
    for step in range(100):
        run.optimizer.zero_grad()
        x = torch.randn(16, 8, generator=draws)
        (run.model(x, step % 3 == 0) - x.sum(1, keepdim=True)).square().mean().backward()
        run.optimizer.step()
    return torch.cat([each.detach().view(-1) for each in run.model.parameters()])


def program() -> tuple[Tensor, list[Tensor], list[Tensor]]:
    hvd.init()
    alone = trained(ALONE, None)
    return alone, *([trained(door, spec) for door in DOORS] for spec in ("topk:ratio=1,wire=exact", "topk:ratio=0.1"))


def test_a_group_that_a_pass_leaves_incomplete_is_exchanged_in_the_step() -> None:
    for alone, whole, sparse in ranks.launch(program, 2):
        for each in whole:
            torch.testing.assert_close(each, alone, rtol=1e-3, atol=1e-4)
        assert torch.equal(*sparse) and sparse[0].isfinite().all()
