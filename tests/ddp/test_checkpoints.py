"""A state of all ranks: torch.distributed.checkpoint saves it, and any number of ranks loads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import small_net
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_run import DdpRun
from rank_server import FOLDER
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.slow

SPECS = ["topk:ratio=0.05,momentum=0.9", "sdagc:lam=1.5,small=pool", "lgc:dense=1,learn=2,ratio=0.05"]


def program(specs: list[str]) -> dict[str, Any]:
    """Save with both ranks, load on both, and go on."""
    ranks.join()
    found = {}
    for i, spec in enumerate(specs):
        run, folder = DdpRun(spec), Path(os.environ[FOLDER]) / str(i)
        run.train(4)
        dcp.save({"gradcomp": run.handle.state_dict()}, checkpoint_id=folder)
        weights = {name: weight.clone() for name, weight in run.plain.state_dict().items()}
        if dist.get_rank() == 0:
            dcp_to_torch_save(folder, folder / "whole.pt")
        dist.barrier()
        whole = torch.load(folder / "whole.pt", weights_only=True)["gradcomp"]
        again = DdpRun(spec)
        again.plain.load_state_dict(weights)
        again.handle.load_state_dict(whole)
        again.data = run.data
        batches = [next(run.data) for _ in range(3)]
        run.data, again.data = iter(batches), iter(batches)
        found[spec] = {"whole": whole, "wanted": run.train(3), "came": again.train(3), "residual": run.handle.residual()}
    return found


@ranks.once
def found() -> list[dict[str, Any]]:
    return ranks.launch(program, 2, SPECS)


@pytest.mark.parametrize("spec", SPECS)
def test_training_goes_on_to_the_bit(spec: str) -> None:
    for own in found():
        assert torch.equal(own[spec]["came"], own[spec]["wanted"])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_number_of_ranks_loads_it(spec: str, world: int) -> None:
    whole = found()[0][spec]["whole"]
    assert [*whole["of_rank"]] == ["0", "1"]
    shapes = {name: tuple(part.shape) for name, part in found()[0][spec]["residual"].items()}
    simulation = gradcomp.Simulation(spec, shapes, world, bucket_mb=0.02)
    simulation.load_state_dict(whole)
    for name in shapes:
        kept = [share["layers"].get("feedback", {}).get("residual", {}) for share in whole["of_rank"].values()]
        wanted = sum(residual.get(name, torch.zeros(())) for residual in kept) / 2
        came = sum(simulation.residual(rank)[name] for rank in range(world)) / world
        torch.testing.assert_close(came.flatten(), torch.as_tensor(wanted).expand(came.numel()))


def with_a_new_rank(saved: int = 2) -> dict[str, Any]:
    """Load a state of two ranks on three."""
    ranks.join()
    model = small_net.net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    named = list(model.named_parameters())
    shapes = {name: tuple(each.shape) for name, each in named}
    simulation = gradcomp.Simulation("topk:ratio=0.05", shapes, saved, optimizer=optimizer, named_parameters=named)
    torch.manual_seed(0)
    for _ in range(4):
        simulation.step([{name: torch.randn_like(each) for name, each in named} for _ in range(saved)])
    state = simulation.state_dict()
    handle = gradcomp.ddp.attach(DistributedDataParallel(model), "topk:ratio=0.05", optimizer=optimizer)
    handle.load_state_dict(state)
    own = handle.state_dict()["of_rank"][str(dist.get_rank())]["layers"]
    return {"saved": state["of_rank"], "own": own}


def test_a_new_rank_takes_the_mean_of_the_moments() -> None:
    first, second, new = ranks.launch(with_a_new_rank, 3)
    shares = [first["saved"][str(rank)]["layers"]["adam"] for rank in range(2)]
    for array in ("first", "second"):
        for name, found in new["own"]["adam"][array].items():
            torch.testing.assert_close(found, torch.stack([share[array][name] for share in shares]).mean(0))
            for rank, old in enumerate((first, second)):
                assert torch.equal(old["own"]["adam"][array][name], shares[rank][array][name])
    assert {*new["own"]["adam"]["steps"].values()} == {4}
    assert not any(bool(each.any()) for each in new["own"]["feedback"]["residual"].values())
