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

# The largest squared error of one exchange.
ERRORS = {"dense": 1e-13, "half": 1e-4, "blocks": 8e-3, "blocks:bits=8": 2e-4}


def exchanged(kind: str, specs: list[str], form: str) -> dict[str, Any]:
    """Exchange the gradients of one step by each spec, and natively."""
    join()
    found: dict[str, Any] = {}
    mesh = mesh_of(kind)
    for spec in [None, *specs]:
        model = wrapped(kind, net(), mesh, reduce_dtype=getattr(torch, form))
        handle = gradcomp.fsdp.attach(model, spec) if spec else None
        loss(model, inputs(0)[dist.get_rank()]).backward()
        if kind != "shards":  # an all-reduce of the user's
            own = torch.full((3,), float(dist.get_rank()))
            dist.all_reduce(own, group=mesh.get_group("replicate"))
            found["own"] = own
        found[spec or "native"] = whole_grads(model), handle.stats() if handle else {}
    return found


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
