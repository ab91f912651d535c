"""DDP ranks that were not there when a state was saved: they take the mean of the others' moments of Adam."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import small_net
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.slow

SPEC, SAVED, RANKS = "topk:ratio=0.05", 2, 3


def program() -> dict[str, Any]:
    ranks.join()
    model = small_net.net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    named = list(model.named_parameters())
    simulation = gradcomp.Simulation(
        SPEC, {name: tuple(each.shape) for name, each in named}, SAVED, optimizer=optimizer, named_parameters=named
    )
    torch.manual_seed(0)
    for _ in range(4):
        simulation.step([{name: torch.randn_like(each) for name, each in named} for _ in range(SAVED)])
    state = simulation.state_dict()
    handle = gradcomp.ddp.attach(DistributedDataParallel(model), SPEC, optimizer=optimizer)
    handle.load_state_dict(state)
    own = handle.state_dict()["of_rank"][str(dist.get_rank())]["layers"]
    return {"saved": state["of_rank"], "own": own}


def test_new_ranks_take_the_mean_of_the_moments() -> None:
    first, second, new = ranks.launch(program, RANKS)
    shares = [first["saved"][str(rank)]["layers"]["adam"] for rank in range(SAVED)]
    for array in ("first", "second"):
        for name, found in new["own"]["adam"][array].items():
            torch.testing.assert_close(found, torch.stack([share[array][name] for share in shares]).mean(0))
            for rank, old in enumerate((first, second)):
                assert torch.equal(old["own"]["adam"][array][name], shares[rank][array][name])
    assert {*new["own"]["adam"]["steps"].values()} == {4}
    assert not any(bool(each.any()) for each in new["own"]["feedback"]["residual"].values())
