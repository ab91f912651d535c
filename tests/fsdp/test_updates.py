"""FSDP2: the exchange of updates between replicas: its law, what it equals, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    ALL_HIDDEN,
    HIDDEN,
    KINDS,
    RANKS,
    are_equal,
    assigned,
    attached,
    by_hand,
    error,
    inputs,
    loss,
    mean,
    mesh_of,
    net,
    shards_of,
    train,
    whole_grads,
    wrapped,
)
from ranks import join, launch, once

import gradcomp
import gradcomp.fsdp

SPECS = ["topk:ratio=0.1", "gs_sgd:ratio=0.05", "orq", "sign", "sdagc:small=dense", "topk:ratio=0.1,warmup=4"]
BY_LAYER = "topk:ratio=0.1; 2.*=blocks; *.bias=dense"


def law(kind: str, spec: str) -> tuple[bool, float, dict[str, Any]]:
    """Take three steps by SGD. Return whether replicas are equal, the imbalance of weights over what moved, and figures."""
    model, handle, mesh = attached(kind, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    equal, wrong = are_equal(model, mesh), 0.0
    for step in range(3):
        optimizer.zero_grad()
        loss(model, inputs(step)[dist.get_rank()]).backward()
        if "warmup" in spec:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        start, before = shards_of(model), mean(handle.residual(), mesh)
        own = {n: 0.1 * each.grad.to_local() for n, each in model.named_parameters()}
        optimizer.step()
        now, after, steps = shards_of(model), mean(handle.residual(), mesh), mean(own, mesh)
        off = sum(float((before[n] + steps[n] - after[n] - (start[n] - now[n])).abs().sum()) for n in own)
        wrong = max(wrong, off / (1e-9 + sum(float(each.abs().sum()) for each in steps.values())))
        equal &= are_equal(model, mesh)
    return equal, wrong, handle.stats()


def rounded(kind: str) -> dict[str, float]:
    """Exchange gradients. Return their errors beside the mean by hand."""
    join()
    found = {}
    for spec in ("dense", "blocks:bits=8"):
        model, handle, _ = attached(kind, spec, net())
        loss(model, inputs(0)[dist.get_rank()]).backward()
        found[spec] = error(whole_grads(model), by_hand(0))
        assert handle.stats()["steps"] == 1 and handle.stats()["bytes_sent"] > 0
    return found


@pytest.mark.parametrize("kind", [HIDDEN, ALL_HIDDEN])
def test_fine_specs_exchange_gradients_over_hidden_replicas_too(kind: str) -> None:
    for rank in launch(rounded, RANKS, kind):
        assert rank["dense"] < 1e-12 and rank["blocks:bits=8"] < 3e-4


def laws(kind: str) -> dict[str, Any]:
    join()
    specs = [*SPECS, BY_LAYER] if kind in ("two by two", HIDDEN) else SPECS[:2]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*over shards rounds gradients coarsely")
        return {spec: law(kind, spec) for spec in specs}


@once
def of_laws(kind: str) -> list[dict[str, Any]]:
    return launch(laws, RANKS, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_conserved_and_replicas_equal(kind: str) -> None:
    """Residual before + the replicas' mean step = residual after + what the weights moved, from equal weights on."""
    for rank in of_laws(kind):
        for spec, (equal, wrong, stats) in rank.items():
            assert equal and (wrong < 1e-3 or spec in ("orq", BY_LAYER)), (
                spec,
                wrong,
            )  # which keep nothing of what they round off
            assert stats["steps"] == 3 and stats["exchanges"].startswith("updates, over replicas"), spec
            assert stats["bytes_dense"] == 4 * sum(each.numel() for each in net().parameters())


def against_one_replica(kind: str) -> tuple[float, float]:
    """Train with everything sent, beside torch's own exchange. Return the distance of the weights, and how far they went."""
    join()
    plain = wrapped("two by two", net(), mesh_of("two by two"))
    model, _, _ = attached(kind, "topk:ratio=1,wire=exact", net())
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for step in range(8):
            optimizer.zero_grad()
            loss(each, inputs(step)[dist.get_rank()]).backward()
            optimizer.step()
    start = wrapped("two by two", net(), mesh_of("two by two"))
    weights = [torch.cat([each.flatten() for each in shards_of(one).values()]) for one in (start, plain, model)]
    return float((weights[1] - weights[2]).norm()), float((weights[1] - weights[0]).norm())


@pytest.mark.parametrize("kind", ["two by two", HIDDEN])
def test_with_everything_sent_it_is_torchs_exchange(kind: str) -> None:
    """The momentum, which is linear in the gradients, too."""
    for apart, far in launch(against_one_replica, RANKS, kind):
        assert apart < 1e-4 * far and far > 0


def refused() -> dict[str, str]:
    join()
    mesh, found = mesh_of("two by two"), {}
    plain = mesh_of("two by two")
    for name, on, replicas in [
        ("both", mesh, plain["replicate"]),
        ("no group", plain["shard"], plain),
        ("no mesh", plain["shard"], "replicate"),
        ("shards", plain["shard"], plain["shard"]),
        ("everyone", plain["shard"], dist.group.WORLD),
    ]:
        with pytest.raises((TypeError, ValueError)) as refusal:
            gradcomp.fsdp.attach(wrapped("two by two", net(), on), "topk", replicas=replicas)
        found[name] = str(refusal.value)
    with pytest.raises(ValueError) as refusal:
        attached(HIDDEN, "topk:clip=1; *.bias=dense")
    found["clip"] = str(refusal.value)
    hooked = wrapped("two by two", net(), plain["shard"])
    hooked[2].set_all_reduce_hook(lambda tensor: None)
    with pytest.raises(ValueError) as refusal:
        gradcomp.fsdp.attach(hooked, "topk", replicas=plain["replicate"])
    found["hook"] = str(refusal.value)
    for name in ("unfrozen", "unfrozen, new"):
        frozen = net()
        frozen[0].requires_grad_(False)
        model = wrapped("two by two", frozen, mesh)
        gradcomp.fsdp.attach(model, "topk")
        if name == "unfrozen, new":
            assigned(model, ["0.weight", "0.bias"])
        model[0].requires_grad_(True)
        with pytest.raises(RuntimeError) as unfrozen:
            train(model, 1)
        found[name] = str(unfrozen.value)
    return found


def test_what_is_refused() -> None:
    for rank in launch(refused, RANKS):
        assert "the mesh of the modules has replicas already" in rank["both"]
        assert "replicas= is a DeviceMesh" in rank["no group"] and "replicas= is a str" in rank["no mesh"]
        assert all("replicas= has ranks with other shards" in rank[name] for name in ("shards", "everyone"))
        assert "clips, and a rank under FSDP2 has the norm of its own shards alone" in rank["clip"]
        assert "the module '2' has an all-reduce hook of its own" in rank["hook"]
        for name in ("unfrozen", "unfrozen, new"):
            assert "'0.weight' of shape (70, 50) was frozen when gradcomp was set up" in rank[name]


def divided(kind: str) -> dict[str, float]:
    """Exchange gradients with a factor of the user's, of which torch's own mesh of both dimensions makes a sum over 5."""
    join()
    found = {}
    for spec in ("dense", "blocks:bits=8", "topk:ratio=1,wire=exact"):
        model, _, _ = attached(kind, spec, net())
        for layer in (0, 2, 4):
            model[layer].set_gradient_divide_factor(5.0)
        model.set_gradient_divide_factor(5.0)
        start = {name: each.full_tensor().detach().clone() for name, each in model.named_parameters()}
        loss(model, inputs(0)[dist.get_rank()]).backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        moved = {name: start[name] - each.full_tensor().detach() for name, each in model.named_parameters()}
        found[spec] = error(moved, {name: each * RANKS / 5 for name, each in by_hand(0).items()})
    return found


def test_a_factor_of_the_users_divides_the_sum_over_all_ranks() -> None:
    for rank in launch(divided, RANKS, ALL_HIDDEN):
        assert rank["dense"] < 1e-8 and rank["blocks:bits=8"] < 3e-4 and rank["topk:ratio=1,wire=exact"] < 1e-8
