"""FSDP2: parameters with fewer rows than there are shards, so that some ranks have nothing of them."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import RANKS, inputs, loss, mesh_of, wrapped
from ranks import join, launch, once
from torch import nn
from torch.distributed.tensor import distribute_tensor

import gradcomp
import gradcomp.fsdp

# By name: a spec, and the widths of a net. Its last layer has one row; "nothing" leaves a whole rank without entries. For
# sdagc, 20 rows of 50 are small, and 21 are not.
SPECS: dict[str, tuple[str, tuple[int, ...]]] = {
    "topk": ("topk:ratio=0.1", (50, 41, 1)),
    "momentum": ("topk:ratio=0.1,momentum=0.9", (50, 41, 1)),
    "rules": ("topk:ratio=0.1; 1.*=sign; *.bias=dense", (50, 41, 1)),
    "small": ("sdagc:small=dense", (50, 41, 1)),
    "nothing": ("topk:ratio=0.1", (50, 1)),
}


def net(widths: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*each) for each in itertools.pairwise(widths)))


def saved(folder: str) -> dict[str, Any]:
    join()
    mesh, found = mesh_of("two by two"), {}
    for name, (spec, widths) in SPECS.items():
        model = wrapped("two by two", net(widths), mesh)
        handle = gradcomp.fsdp.attach(model, spec)
        for step in range(2):
            model.zero_grad()
            loss(model, inputs(step)[dist.get_rank()]).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        state = handle.state_dict()
        tables = {key: each for key, each in state.items() if isinstance(each, dict)}
        orders = {array: [*table] for array, table in tables.items()}
        empty = {n for n, each in model.named_parameters() if not each.to_local().numel()}
        every: list[Any] = [None] * RANKS
        dist.all_gather_object(every, orders)
        found[name] = (
            every,
            {n for n, each in tables["residual"].items() if not each.to_local().numel()} == empty & {*orders["residual"]},
            bool(empty),
        )
        if every != [orders] * RANKS:
            continue  # ranks would wait for each other
        whole = {array: {n: each.full_tensor() for n, each in table.items()} for array, table in tables.items()}
        dcp.save({"gradcomp": state}, checkpoint_id=f"{folder}-{name}")
        own = handle.residual()
        for each in own.values():
            dist.all_reduce(each, group=mesh.get_group("replicate"))
        wrong = 0.0
        for n, each in whole["residual"].items():
            parameter = model.get_parameter(n)
            part = distribute_tensor(each, parameter.device_mesh, parameter.placements).to_local()
            wrong = max([wrong, *(part - own[n] / 2).abs().flatten().tolist()])
        loaded = []
        before = {k: {n: v for n, v in each.items() if n not in empty} for k, each in tables.items()}
        before = {k: table for k, table in before.items() if table}
        for _ in range(2):  # a state of the last version; one of a checkpoint
            handle = gradcomp.fsdp.attach(wrapped("two by two", net(widths), mesh), spec)
            if not loaded:
                handle.load_state_dict({"spec": state["spec"], "steps": state["steps"], **before})
            else:
                again = {"gradcomp": handle.state_dict()}
                dcp.load(again, checkpoint_id=f"{folder}-{name}")
                handle.load_state_dict(again["gradcomp"])
            loaded.append(all(torch.equal(each, own[n] / 2) for n, each in handle.residual().items()))
        handle.change("blocks")  # which delivers what waits
        found[name] += wrong, loaded, handle.stats()["exchanges"]
    return found


@once
def saving() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return launch(saved, RANKS, str(Path(folder) / "state"))


@pytest.mark.parametrize("name", SPECS)
def test_all_ranks_save_the_same_layers_in_the_same_order(name: str) -> None:
    """An empty shard is an empty DTensor, so that full_tensor() pairs equal layers."""
    some_empty = []
    for rank in saving():
        orders, are_empty, some, *rest = rank[name]
        assert all([*each.items()] == [*orders[0].items()] for each in orders), orders
        assert are_empty
        some_empty.append(some)
        wrong, loaded, after = rest
        assert wrong < 1e-6 and all(loaded) and after == "gradients, over shards and replicas"
    assert any(some_empty) and not all(some_empty)
