"""FSDP2: refusals, ranks that differ, backward passes that fail, and gradients that are not finite."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import RANKS, by_hand, error, inputs, loss, mesh_of, net, whole_grads, wrapped
from ranks import join, launch, once
from torch.distributed._composable import replicate as old_replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import gradcomp
import gradcomp.fsdp

SPARSE = "topk:ratio=0.1"


def refusal(act: Any) -> str:
    try:
        act()
    except Exception as found:
        return f"{type(found).__name__}: {found}"
    return "nothing"


def backward(model: Any) -> None:
    model.zero_grad()
    loss(model, inputs(0)[dist.get_rank()]).backward()


def refused(kind: str) -> dict[str, str]:
    mesh = mesh_of(kind)
    cpu = torch.device("cpu")

    def attached(spec: str = "blocks") -> Any:
        model = wrapped(kind, net(), mesh)
        gradcomp.fsdp.attach(model, spec)
        return model

    def memory_of_group(first: bool) -> None:
        model = wrapped(kind, net(), mesh) if first else attached()
        model[0].set_allocate_memory_from_process_group_for_comm(True)
        if first:
            gradcomp.fsdp.attach(model, "blocks")

    attach = gradcomp.fsdp.attach
    acts = {
        "plain": lambda: attach(net(), "blocks"),
        "DDP": lambda: attach(DistributedDataParallel(net()), "blocks"),
        "DDP's door": lambda: gradcomp.ddp.attach(wrapped(kind, net(), mesh), "blocks"),
        "FSDP1": lambda: attach(FullyShardedDataParallel(net(), device_id=cpu), "blocks"),
        "old": lambda: attach(old_replicate(net()), "blocks"),
        "frozen": lambda: attach(wrapped(kind, net().requires_grad_(False), mesh), "blocks"),
        "twice": lambda: attach(attached(), "blocks"),
        "auto": lambda: attached("auto"),
        "whole model": lambda: attached("gs_sgd"),
        "residual": lambda: attached("topk"),
        "memory first": lambda: memory_of_group(True),
        "memory later": lambda: memory_of_group(False),
        "backend": lambda: dist.new_group(backend="gradcomp"),
        "groups": lambda: attach(of_two_groups(mesh), "blocks"),
        "meshes": lambda: attach(of_two_meshes(), "blocks"),
    }
    return {name: refusal(act) for name, act in acts.items()}


def unwrapped() -> list[str]:
    """Attach before the last layer and the model are wrapped."""
    model = net()
    fully_shard(model[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradcomp.fsdp.attach(model, "blocks")
    return [str(each.message) for each in caught]


def of_two_groups(mesh: Any) -> Any:
    """Give the biases a mesh of their own, of two ranks."""
    halves = FSDPMeshInfo(mesh_of("two by two")["shard"], shard_mesh_dim=0)
    infos = {1: halves, 2: FSDPMeshInfo(mesh, shard_mesh_dim=0)}
    return fully_shard(net(), mesh=mesh, shard_placement_fn=lambda each: ShardPlacementResult(Shard(0), infos[each.dim()]))


def of_two_meshes() -> Any:
    model = net()
    fully_shard(model[0], mesh=mesh_of("shards"))
    fully_shard(model, mesh=mesh_of("two by two"))
    return model


def failed(kind: str) -> dict[str, Any]:
    join()
    found: dict[str, Any] = {"refused": refused(kind), "unwrapped": unwrapped()} if kind == "shards" else {}
    mesh, rank = mesh_of(kind), dist.get_rank()
    found["specs"] = refusal(lambda: gradcomp.fsdp.attach(wrapped(kind, net(), mesh), "half" if rank == 3 else "blocks"))
    model = wrapped(kind, net(), mesh)
    handle = gradcomp.fsdp.attach(model, "blocks:bits=8")
    backward(model)
    found["change"] = refusal(lambda: handle.change("half" if rank == 3 else "blocks:bits=4"))
    hook = model[2].register_full_backward_pre_hook(lambda *_: 1 / 0)
    found["in backward"] = refusal(lambda: backward(model))
    hook.remove()
    model._get_fsdp_state()._reset_iter_state()  # as after any error in a backward pass
    backward(model)
    found["afterwards"] = error(whole_grads(model), by_hand(0)), handle.stats()["steps"]
    model = wrapped(kind, net(), mesh)
    handle = gradcomp.fsdp.attach(model, "blocks" if kind == "shards" else SPARSE)
    backward(model)
    model.zero_grad()
    batch = inputs(0)[rank].clone()
    if rank == 1:
        batch[0, 5] = float("inf")
    model(batch).square().mean().backward()
    finite = {name: bool(each.grad.to_local().isfinite().all()) for name, each in model.named_parameters()}
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())
    residual = all(bool(each.isfinite().all()) for each in handle.residual().values())
    backward(model)
    after = all(bool(each.isfinite().all()) for each in whole_grads(model).values())
    return found | {"not finite": (finite, norm, residual, after)}


@once
def failing(kind: str) -> list[dict[str, Any]]:
    return launch(failed, RANKS, kind)


WORDS = {
    "plain": "TypeError: attach() got a Sequential without any module of FSDP2",
    "DDP": "TypeError: attach() got a DistributedDataParallel model; call gradcomp.ddp.attach()",
    "DDP's door": "TypeError: attach() got a FSDPSequential; call gradcomp.fsdp.attach(), which is for FSDP2",
    "FSDP1": "TypeError: attach() got a model of FSDP1; wrap it by fully_shard()",
    "old": "TypeError: attach() got a model of the older replicate()",
    "frozen": "ValueError: attach() got a model without trained parameters",
    "twice": "RuntimeError: the model has been given to attach() already",
    "auto": "ValueError: auto does not choose over FSDP2",
    "whole model": "ValueError: gs_sgd cannot act over shards, and the mesh has no replicas",
    "residual": "ValueError: topk cannot act over shards, and the mesh has no replicas",
    "memory first": "ValueError: the module '0' has a reduce-scatter of its own, ProcessGroupAllocReduceScatter",
    "memory later": "AssertionError: cannot call set_allocate_memory_from_process_group()",  # torch's own word
    "backend": 'the backend "gradcomp" is no longer needed: leave it out of init_device_mesh(',
    "groups": "has parameters on several meshes, by its shard_placement_fn",
    "meshes": "are on different meshes",
}


@pytest.mark.parametrize("name", WORDS)
def test_refusals(name: str) -> None:
    for rank in failing("shards"):
        assert WORDS[name] in rank["refused"][name]


def test_layers_that_are_not_wrapped_are_told_of() -> None:
    said = "the parameters '2.weight', '2.bias', '4.weight' and others are in no module of FSDP2"
    for rank, found in enumerate(failing("shards")):
        assert [text.partition(", so that")[0] for text in found["unwrapped"]] == [said] * (rank == 0)


@pytest.mark.parametrize("kind", ["shards", "two by two"])
def test_ranks_with_different_specs_all_say_so(kind: str) -> None:
    """They do not wait for each other, also those that differ from ranks with other shards alone. The exchange goes on."""
    for rank in failing(kind):
        for found in (rank["specs"], rank["change"]):
            assert "the ranks do not agree" in found and "half" in found
    if kind == "two by two":
        for number, rank in enumerate(failing(kind)):
            other = "spec: rank 1 has 'blocks', rank 3 has 'half'"
            assert (other if number % 2 else "rank 1 has") in rank["specs"]


@pytest.mark.parametrize("kind", ["shards", "two by two"])
def test_training_goes_on_after_an_error_in_a_backward_pass(kind: str) -> None:
    for rank in failing(kind):
        assert "ZeroDivisionError" in rank["in backward"]
        wrong, steps = rank["afterwards"]
        assert wrong < 1e-4 and steps == 2


@pytest.mark.parametrize("kind", ["shards", "two by two"])
def test_a_gradient_that_is_not_finite(kind: str) -> None:
    """All ranks with the part see it, the clip's norm shows it to all, and nothing of it stays."""
    ranks = failing(kind)
    for number, rank in enumerate(ranks):
        finite, norm, residual, after = rank["not finite"]
        assert norm != norm or norm == float("inf")
        assert residual and after
        if kind == "two by two":
            assert finite == ranks[number ^ 2]["not finite"][0]
    assert not all(all(rank["not finite"][0].values()) for rank in ranks)


def dies() -> None:
    """End rank 3 in the middle of its backward pass, and the others with the error that they get then."""
    join()
    model = wrapped("two by two", net())
    gradcomp.fsdp.attach(model, SPARSE)
    backward(model)
    if dist.get_rank() == 3:
        model[2].register_full_backward_pre_hook(lambda *_: os._exit(9))
    os._exit(8 if "RuntimeError" in refusal(lambda: backward(model)) else 7)


def test_a_rank_that_dies_ends_the_others() -> None:
    launch(dies, RANKS, dies={0: 8, 1: 8, 2: 8, 3: 9}, seconds=60)
