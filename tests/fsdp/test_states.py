"""FSDP2: states through torch.distributed.checkpoint, training, and telemetry."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import RANKS, by_hand, inputs, loss, mesh_of, net, wrapped
from ranks import join, launch, once
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import distribute_tensor

import gradcomp
import gradcomp.fsdp
from gradcomp import telemetry

SPARSE = "topk:ratio=0.1"


def backward(model: Any, step: int) -> None:
    model.zero_grad()
    loss(model, inputs(step)[dist.get_rank()]).backward()


def local(model: Any, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cut a rank's shards out of whole tensors."""
    shards = {n: distribute_tensor(whole[n], each.device_mesh, each.placements) for n, each in model.named_parameters()}
    return {name: each.to_local() for name, each in shards.items()}


def mean_residual(handle: Any, mesh: Any) -> dict[str, Tensor]:
    found = handle.residual()
    for each in found.values():
        dist.all_reduce(each, group=mesh.get_group("replicate"))
    return {name: each / mesh["replicate"].size() for name, each in found.items()}


def move(model: Any, step: int, rate: float = 1.0) -> dict[str, Tensor]:
    """Take a step by SGD from net()'s weights. Return by how much this rank's shards have moved."""
    whole = net().state_dict()
    start = {n: distribute_tensor(whole[n], each.device_mesh, each.placements) for n, each in model.named_parameters()}
    model.load_state_dict(start)
    backward(model, step)
    torch.optim.SGD(model.parameters(), lr=rate).step()
    return {n: start[n].to_local() - each.to_local().detach() for n, each in model.named_parameters()}


def imbalance(model: Any, handle: Any, mesh: Any, step: int) -> float:
    """Return the largest entry of residual before + gradient - residual after - update, each the mean over replicas."""
    before = mean_residual(handle, mesh)
    updates = move(model, step)
    after, wanted = mean_residual(handle, mesh), local(model, by_hand(step))
    return max(float((before[n] + wanted[n] - after[n] - updates[n]).abs().sum()) for n in updates)


def saved(folder: str) -> dict[str, Any]:
    """Save on two by two, load on one shard and on replicate(), and save blocks for shards."""
    join()
    found: dict[str, Any] = {}
    wanted: dict[str, Tensor] = {}
    for kind in ("two by two", "one shard", "replicate"):
        mesh = mesh_of(kind)
        model = wrapped(kind, net(), mesh)
        handle = gradcomp.fsdp.attach(model, SPARSE)
        if kind == "two by two":
            for step in range(2):
                move(model, step)
            dcp.save({"gradcomp": handle.state_dict()}, checkpoint_id=folder)
            wanted = {n: each.full_tensor() for n, each in handle.state_dict()["residual"].items()}
            before = mean_residual(handle, mesh)
            found["saved"] = max(float((each - before[n]).abs().max()) for n, each in local(model, wanted).items())
            continue
        state = {"gradcomp": handle.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        handle.load_state_dict(state["gradcomp"])
        own, mean = local(model, wanted), mean_residual(handle, mesh)
        law = imbalance(model, handle, mesh, 2)
        found[kind] = max(float((mean[n] - own[n]).abs().max()) for n in own), handle.stats()["steps"], law
    found["refused"] = refusals(handle)
    for step in range(2):  # the second handle goes on where the first one has saved
        handle = gradcomp.fsdp.attach(wrapped("shards", net()), "blocks")
        state = {"gradcomp": handle.state_dict()}
        if step:
            dcp.load(state, checkpoint_id=f"{folder}-blocks")
            handle.load_state_dict(state["gradcomp"])
        else:
            handle._session.reducer.steps_done = 7
            dcp.save({"gradcomp": handle.state_dict()}, checkpoint_id=f"{folder}-blocks")
    return found | {"shards": handle.stats()["steps"]}


def refusals(handle: Any) -> dict[str, str]:
    good = handle.state_dict()
    residual = good["residual"]
    first, second, *_ = residual
    states: dict[str, Any] = {
        "no dict": [],
        "no spec": {},
        "other spec": {**good, "spec": "blocks"},
        "steps": {**good, "steps": -1},
        "no table": {**good, "residual": 3},
        "layer missing": {**good, "residual": {n: each for n, each in residual.items() if n != first}},
        "layer too many": {**good, "residual": {**residual, "other": residual[first]}},
        "no DTensor": {**good, "residual": {**residual, first: residual[first].full_tensor()}},
        "other shape": {**good, "residual": {**residual, first: residual[second]}},
        "ages of another type": {**good, "ages": residual},
        "not finite": {**good, "residual": {**residual, first: residual[first] * float("nan")}},
    }
    found = {}
    for name, state in states.items():
        before = handle.residual()
        with pytest.raises(ValueError) as caught:
            handle.load_state_dict(state)
        assert all(torch.equal(before[n], each) for n, each in handle.residual().items())
        found[name] = str(caught.value)
    return found


@once
def saving() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return launch(saved, RANKS, str(Path(folder) / "state"))


def test_a_state_is_loaded_on_another_mesh() -> None:
    """The mean of the residuals stays, and training goes on from it."""
    for rank in saving():
        assert rank["saved"] < 1e-7 and rank["shards"] == 7
        for kind in ("one shard", "replicate"):
            most, steps, law = rank[kind]
            assert most < 1e-7 and steps == 3 and law < 1e-4


def resumed() -> list[Tensor]:
    """Train with a momentum that waits in the residual, without and with a load of the handle's own state."""
    join()
    found = []
    for loads in (False, True):
        model = wrapped("two by two", net())
        handle = gradcomp.fsdp.attach(model, "topk:ratio=1,wire=exact")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for step in range(6):
            if loads and step == 3:
                handle.load_state_dict(handle.state_dict())
            backward(model, step)
            optimizer.step()
        found.append(torch.cat([each.full_tensor().detach().flatten() for each in model.parameters()]))
    return found


def test_a_momentum_in_a_loaded_residual_is_delivered_step_by_step() -> None:
    for kept, loaded in launch(resumed, RANKS):
        torch.testing.assert_close(loaded, kept, rtol=1e-5, atol=1e-5)


def resumed_from(folder: str) -> dict[str, Tensor]:
    """Train with a momentum that stays in the replicas' optimizers, save everything, and go on, with and without a load."""
    join()
    mesh, found = mesh_of("two by two"), dict[str, Tensor]()
    for loads in (False, True):
        model = wrapped("two by two", net(1 if loads else 0), mesh)
        handle = gradcomp.fsdp.attach(model, "topk:ratio=1,wire=exact,momentum=0")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for step in range(3, 6) if loads else range(6):
            if step == 3:
                models, optimizers = get_state_dict(model, optimizer)
                state = {"model": models, "optimizer": optimizers, "gradcomp": handle.state_dict()}
                (dcp.load if loads else dcp.save)(state, checkpoint_id=folder)
                if loads:
                    set_state_dict(model, optimizer, model_state_dict=models, optim_state_dict=optimizers)
                    handle.load_state_dict(state["gradcomp"])
            backward(model, step)
            optimizer.step()
        found["resumed" if loads else "straight"] = torch.cat([each.full_tensor().flatten() for each in model.parameters()])
    return found


def test_a_momentum_that_stays_in_the_optimizers_of_replicas_is_resumed() -> None:
    """A checkpoint keeps the optimizer's state of one replica."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in launch(resumed_from, RANKS, folder):
            torch.testing.assert_close(rank["resumed"], rank["straight"], rtol=1e-6, atol=1e-7)


WORDS = {
    "no dict": "no state of gradcomp.fsdp",
    "no spec": "no 'spec'",
    "other spec": "saved with 'blocks'",
    "steps": "steps=-1 in the state",
    "no table": "not a dict",
    "layer missing": "only the model has",
    "layer too many": "only the state has 'other'",
    "no DTensor": "no finite DTensor",
    "other shape": "no finite DTensor",
    "ages of another type": "no finite DTensor",
    "not finite": "no finite DTensor",
}


@pytest.mark.parametrize("name", WORDS)
def test_another_state_is_refused(name: str) -> None:
    for rank in saving():
        assert WORDS[name] in rank["refused"][name]


def trained(kind: str) -> dict[str, Any]:
    """Train natively and with specs, AdamW and a clip; watch one of them."""
    join()
    found: dict[str, Any] = {}
    mesh = mesh_of(kind)
    for spec in (None, "dense", "blocks", *(["topk:ratio=0.1"] if kind != "shards" else [])):
        model = wrapped(kind, net(), mesh)
        handle = gradcomp.fsdp.attach(model, spec) if spec else None
        records: list[Any] = []
        if spec == "blocks":
            with pytest.raises(ValueError, match="read the handle's stats"):
                telemetry.watch(handle, records.append)
        elif spec not in (None, "dense"):
            telemetry.watch(handle, records.append, every=1, check=2)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True), []
        for step in range(12):
            error = (model(inputs(step)[dist.get_rank()]) - 1).square().mean()
            error.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(error.item())
        weights = {n: each.full_tensor().detach() for n, each in model.named_parameters()}
        found[spec or "native"] = weights, losses, handle.stats() if handle else {}, records
    return found


@once
def training(kind: str) -> list[dict[str, Any]]:
    return launch(trained, RANKS, kind)


@pytest.mark.parametrize("kind", ["shards", "two by two"])
def test_a_training_with_a_clip_and_adamw(kind: str) -> None:
    """dense trains as native does, to the bit, and blocks within noise."""
    for rank in training(kind):
        native, dense, blocks = (rank[spec] for spec in ("native", "dense", "blocks"))
        assert all(torch.equal(each, dense[0][n]) for n, each in native[0].items())
        assert native[1] == dense[1] and abs(native[1][-1] - blocks[1][-1]) < 0.02 * native[1][-1]
        entries = sum(each.numel() for each in native[0].values())
        for _, _, stats, _ in (dense, blocks):
            assert stats["steps"] == 12 and stats["bytes_dense"] == 4 * entries
            assert stats["bytes_sent"] > 0 and (kind != "shards" or stats["bytes_between_hosts"] == 0)


def test_telemetry_over_replicas() -> None:
    for number, rank in enumerate(training("two by two")):
        *_, stats, records = rank["topk:ratio=0.1"]
        assert {each["rank"] for each in records} == {number}, "of all ranks, not of the replicas"
        assert [each["step"] for each in records] == [*range(1, 13)]
        assert records[-1]["compression"] == pytest.approx(stats["compression"])
