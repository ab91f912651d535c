"""The optimizer's own state: Horovod broadcasts rank 0's to all, without any rank's residual in it."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import ranks
import torch
from doors import DOORS, Training

pytestmark = pytest.mark.slow


def broadcast() -> dict[str, dict[str, Any]]:
    """Return the state_dict of an optimizer that keeps its momentum, before and after Horovod broadcasts it."""
    hvd.init()
    found = {}
    for door in DOORS:
        run = Training(door, spec="topk:ratio=0.05,momentum=0", momentum=0.9, bucket_mb=0.015)
        run.train(3)
        residual, before = run.residual(), run.optimizer.state_dict()
        hvd.broadcast_optimizer_state(run.optimizer, 0)
        plain = torch.optim.SGD(run.model.parameters(), 0.02, momentum=0.9).state_dict()
        found[door] = {
            "keys": {key for entry in before["state"].values() for key in entry},
            "groups": [[sorted(group) for group in state["param_groups"]] for state in (before, plain)],
            "buffers": [entry["momentum_buffer"] for entry in run.optimizer.state_dict()["state"].values()],
            "kept": all(torch.equal(left, residual[name]) for name, left in run.residual().items()),
            "residual": residual["last.weight"],
            "weights": run.train(3),
        }
    return found


outcomes = ranks.once(lambda: ranks.launch(broadcast, 2))


@pytest.mark.parametrize("door", DOORS)
def test_the_optimizers_own_state_is_the_stock_one(door: str) -> None:
    first, second = (found[door] for found in outcomes())
    for own in (first, second):
        assert own["keys"] == {"momentum_buffer"} and own["groups"][0] == own["groups"][1] and own["kept"]
    assert all(map(torch.equal, first["buffers"], second["buffers"]))
    assert not torch.equal(first["residual"], second["residual"])
    assert torch.equal(first["weights"], second["weights"])
