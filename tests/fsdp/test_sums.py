"""FSDP2: the sums of gradients beside a computation by hand, bytes, and the operations of others on the same groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import MESHES, RANKS, REPLICATED, by_hand, error, inputs, loss, mesh_of, net, whole_grads, wrapped
from ranks import join, launch, once

import gradcomp
import gradcomp.fsdp
from gradcomp.networks import replicas

# The largest squared error of one exchange.
ERRORS = {"dense": 1e-13, "half": 1e-4, "blocks": 8e-3, "blocks:bits=8": 2e-4}


def exchanged(kind: str, specs: list[str], form: str) -> dict[str, Any]:
    """Exchange the gradients of one step by each spec, and natively."""
    join()
    found: dict[str, Any] = {}
    mesh, plain = mesh_of(kind), mesh_of(kind, {})
    for spec in [None, *specs]:
        model = wrapped(kind, net(), mesh if spec else plain, reduce_dtype=getattr(torch, form))
        handle = gradcomp.fsdp.attach(model, spec) if spec else None
        loss(model, inputs(0)[dist.get_rank()]).backward()
        if kind != "shards":  # an all-reduce of the user's
            own = torch.full((3,), float(dist.get_rank()))
            dist.all_reduce(own, group=mesh.get_group("replicate"))
            found["own"] = own
        found[spec or "native"] = whole_grads(model), handle.stats() if handle else {}
    return found


def without_work() -> Any:
    """Exchange natively over replicas where an all-reduce returns nothing, as NCCL's does on the current stream."""
    join()
    native = replicas.ReplicaGroup.allreduce_natively

    def reduce(*arguments: Any) -> None:
        native(*arguments).wait()

    replicas.ReplicaGroup.allreduce_natively = reduce
    model = wrapped("replicate", net(), mesh_of("replicate"))
    gradcomp.fsdp.attach(model, "dense")
    loss(model, inputs(0)[dist.get_rank()]).backward()
    return whole_grads(model)


def test_an_all_reduce_without_an_object_to_wait_for_is_native_too() -> None:
    assert all(error(grads, by_hand(0)) < 1e-13 for grads in launch(without_work, RANKS))


@once
def of_mesh(kind: str, form: str = "float32") -> list[dict[str, Any]]:
    return launch(exchanged, RANKS, kind, [*ERRORS], form)


@pytest.mark.parametrize("kind", MESHES)
def test_gradients_are_the_mean_of_all_ranks(kind: str) -> None:
    wanted = by_hand(0)
    for rank in of_mesh(kind):
        for spec, most in ERRORS.items():
            grads, stats = rank[spec]
            assert error(grads, wanted) < most, spec
            assert stats["steps"] == 1


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_dense_is_native_to_the_bit(kind: str, form: str) -> None:
    for rank in of_mesh(kind, form):
        native, dense = rank["native"][0], rank["dense"][0]
        assert all(torch.equal(native[name], dense[name]) for name in native)


@pytest.mark.parametrize("kind", MESHES)
def test_all_ranks_have_the_same_gradients(kind: str) -> None:
    first, *others = of_mesh(kind)
    for spec in ERRORS:
        for other in others:
            assert all(torch.equal(first[spec][0][n], other[spec][0][n]) for n in first[spec][0])


@pytest.mark.parametrize("kind", REPLICATED)
def test_an_allreduce_of_the_users_is_native(kind: str) -> None:
    for number, rank in enumerate(of_mesh(kind)):
        members = [0, 1, 2, 3] if kind != "two by two" else [number % 2, number % 2 + 2]
        assert rank["own"].tolist() == [float(sum(members))] * 3


def test_a_rank_sends_its_parts_to_the_others() -> None:
    """Of four shards a rank sends three; the blocks' own bytes are those of the wire format."""
    for rank in of_mesh("shards"):
        stats = rank["blocks:bits=8"][1]
        entries = sum(each.numel() for each in net().parameters())
        assert stats["bytes_dense"] == 4 * entries and stats["compression"] == stats["bytes_dense"] / stats["bytes_sent"]
        assert 0.75 * 8.25 / 8 * entries < stats["bytes_sent"] < 0.75 * 8.25 / 8 * entries * 1.25


def others() -> list[float]:
    """Run every operation of torch's over a group of replicas, many times in turn."""
    join()
    group = mesh_of("replicate").get_group()
    rank = dist.get_rank()
    found: dict[str, torch.Tensor] = {}
    for _ in range(100):
        own = torch.tensor([float(rank)])
        every = [torch.empty(1) for _ in range(RANKS)]
        dist.all_reduce(found.setdefault("all_reduce", own.clone()).copy_(own), group=group)
        dist.broadcast(found.setdefault("broadcast", own.clone()).copy_(own), 2, group=group)
        dist.all_gather(every, own, group=group)
        found["all_gather"] = torch.cat(every)
        dist.all_to_all_single(found.setdefault("all_to_all", torch.empty(RANKS)), own.expand(RANKS).clone(), group=group)
        dist.reduce_scatter(found.setdefault("reduce_scatter", torch.empty(1)), [own] * RANKS, group=group)
        group.allreduce_coalesced([found.setdefault("coalesced", own.clone()).copy_(own)]).wait()
        moves = [dist.isend(own, (rank + 1) % RANKS, group=group)]
        dist.recv(found.setdefault("received", torch.empty(1)), (rank - 1) % RANKS, group=group)
        moves[0].wait()
        dist.barrier(group=group)
    group.barrier()
    given: Any = group._get_backend(torch.device("cpu")).options
    assert (given.group_name, given.global_ranks_in_group) == (group.group_name, [*range(RANKS)])  # for torch's flight recorder
    return torch.cat([*found.values()]).tolist()


def test_all_operations_of_torchs_go_on_over_replicas() -> None:
    total = float(sum(range(RANKS)))
    ranks = [*map(float, range(RANKS))]
    for rank, found in enumerate(launch(others, RANKS, seconds=60)):
        assert found == [total, 2.0, *ranks, *ranks, total, total, float((rank - 1) % RANKS)], rank
