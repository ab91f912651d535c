"""One rank that leaves out a step of AdamW, although it has exchanged: the ranks go on, as under DDP alone."""

from __future__ import annotations

from typing import Any

import doors
import pytest
import ranks
import torch
import torch.distributed as dist
from doors import DDP, Training

pytestmark = pytest.mark.slow

SPECS, STEPS, LEFT_OUT = ("topk", "orq", "sdagc"), 42, (3, 30)  # noise is compared in every eighth step


def program() -> dict[str, Any]:
    doors.join(DDP)
    found = {}
    for spec in SPECS:
        model = torch.nn.Linear(20, 10)
        dist.broadcast(model.weight.data, 0)
        run = Training(DDP, model, spec, inner=torch.optim.AdamW(model.parameters(), 0.01))
        for step in range(STEPS):
            run.optimizer.zero_grad()
            run.whole(torch.randn(8, 20)).square().mean().backward()
            if not (dist.get_rank() == 1 and step in LEFT_OUT):
                run.optimizer.step()
        found[spec] = run.handle.stats()["steps"]
    return found


def test_the_ranks_go_on_after_a_step_that_one_of_them_leaves_out() -> None:
    first, second = ranks.launch(program, 2)
    assert first == dict.fromkeys(SPECS, STEPS) and second == dict.fromkeys(SPECS, STEPS - len(LEFT_OUT))
