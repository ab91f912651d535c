"""FSDP2: replicas stay equal in every kind of program, where they exchange updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import HIDDEN, RANKS, are_equal, assigned, attached, inputs, loss, mean, net, shards_of, train
from ranks import join, launch, once
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard, distribute_tensor

# Programs: each takes steps, and returns the model and the mesh.


def momentum_clip_and_foreach(kind: str) -> Any:
    model, _, mesh = attached(kind, "topk:ratio=0.1")

    def act(step: int, optimizer: Any) -> None:
        loss(model, inputs(step)[dist.get_rank()]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    train(model, 5, act, foreach=True)
    return model, mesh


def accumulated(kind: str) -> Any:
    model, _, mesh = attached(kind, "topk:ratio=0.1")

    def act(step: int, optimizer: Any) -> None:
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            loss(model, inputs(10 * step + part)[dist.get_rank()]).backward()

    train(model, 3, act)
    return model, mesh


def two_passes_and_kept_gradients(kind: str) -> Any:
    model, _, mesh = attached(kind, "topk:ratio=0.1")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(4):
        loss(model, inputs(step)[dist.get_rank()]).backward()
        loss(model, inputs(9 - step)[dist.get_rank()]).backward()
        optimizer.step()  # gradients stay
    return model, mesh


def frozen_and_thawed(kind: str) -> Any:
    model, _, mesh = attached(kind, "topk:ratio=0.1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        model[2].requires_grad_(step < 2 or step > 3)
        before = shards_of(model)["2.weight"]
        optimizer.zero_grad()
        loss(model, inputs(step)[dist.get_rank()]).backward()
        optimizer.step()
        assert (step in (2, 3)) == torch.equal(before, shards_of(model)["2.weight"]) or not before.numel()
    return model, mesh


def changed(kind: str) -> Any:
    model, handle, mesh = attached(kind, "topk:ratio=0.1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, spec in enumerate(("topk:ratio=0.1", "blocks", "topk:ratio=0.2", "dense", "sign", "half")):
        handle.change(spec)
        for again in range(2):
            optimizer.zero_grad()
            loss(model, inputs(2 * step + again)[dist.get_rank()]).backward()
            optimizer.step()
            assert are_equal(model, mesh), spec
    return model, mesh


def sharded_by_columns(kind: str) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(50, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
    model, _, mesh = attached(kind, "topk:ratio=0.1", layers, shard_placement_fn=lambda _: Shard(1))
    train(model)
    return model, mesh


def offloaded(kind: str) -> Any:
    model, _, mesh = attached(kind, "topk:ratio=0.1", offload_policy=CPUOffloadPolicy(pin_memory=False))
    train(model)
    return model, mesh


def in_bfloat16(kind: str) -> Any:
    model, _, mesh = attached(kind, "topk:ratio=0.1", net().bfloat16())
    train(model, 3, lambda step, _: loss(model, inputs(step)[dist.get_rank()].bfloat16()).backward())
    return model, mesh


def scaled_by_a_sum(kind: str) -> Any:
    model, _, mesh = attached(kind, "topk:ratio=0.1", reduce_dtype=torch.float16)
    train(model)
    return model, mesh


def loaded_after(kind: str) -> Any:
    """Parameters come after attach(), as new ones."""
    with torch.device("meta"):
        empty = net()
    model, _, mesh = attached(kind, "topk:ratio=0.1", empty)
    state = net().state_dict()
    shards = {n: distribute_tensor(state[n], each.device_mesh, each.placements) for n, each in model.named_parameters()}
    model.load_state_dict(shards, assign=True)
    train(model)
    return model, mesh


def not_finite_on_one_rank(kind: str) -> Any:
    """A scaler skips the step in all replicas alike, and training goes on."""
    model, handle, mesh = attached(kind, "topk:ratio=0.1")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        batch = inputs(step)[dist.get_rank()].clone()
        if step == 1 and dist.get_rank() == 1:
            batch[0, 5] = float("inf")
        loss(model, batch).backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
        finite = bool(norm.full_tensor().isfinite())
        assert finite == (step != 1)
        if finite:
            optimizer.step()
    assert handle.stats()["steps"] == 3
    return model, mesh


def a_failed_step_and_a_change(kind: str) -> Any:
    """The step has moved some weights, on each replica in its own way."""
    model, handle, mesh = attached(kind, "topk:ratio=0.1")
    optimizer = torch.optim.SGD([{"params": [each]} for each in model.parameters()], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, inputs(step)[dist.get_rank()]).backward()
        if step == 1:
            before, optimizer.param_groups[2]["lr"] = shards_of(model), None
            with pytest.raises(TypeError):
                optimizer.step()
            optimizer.param_groups[2]["lr"] = 0.1
            handle.change("topk:ratio=0.2")
            assert all(torch.equal(each, before[name]) for name, each in shards_of(model).items())
        else:
            optimizer.step()
    return model, mesh


def replaced_in_part(kind: str) -> Any:
    """One part gets other parameters, and an optimizer. That of the other part goes on, and its moment is not taken for new."""
    model, _, mesh = attached(kind, "topk:ratio=1,wire=exact")
    first, second = (torch.optim.Adam(part.parameters(), lr=1e-3) for part in (model[0], model[2]))
    far = []
    for step in range(6):
        if step == 3:
            assigned(model, ["2.weight", "2.bias"])
            second = torch.optim.Adam(model[2].parameters(), lr=1e-3)
        model.zero_grad()
        loss(model, inputs(step)[dist.get_rank()]).backward()
        before = shards_of(model)["0.weight"]
        first.step()
        second.step()
        far.append(float((shards_of(model)["0.weight"] - before).abs().max()) if before.numel() else 0.0)
    assert max(far[3:]) <= 2 * max(far[:3]), far
    return model, mesh


def replaced_before_a_change(kind: str) -> Any:
    """What waits is delivered into the parameters that the model has now."""
    model, handle, mesh = attached(kind, "topk:ratio=0.01")
    train(model, 3)
    assigned(model, ["0.weight", "2.weight"])
    before = shards_of(model)
    waits = mean(handle.residual(), mesh)
    handle.change("blocks")
    for name, each in shards_of(model).items():
        torch.testing.assert_close(before[name] - each, waits[name], rtol=1e-4, atol=1e-6)
    return model, mesh


def memory_after(kind: str) -> Any:
    """Weights get their memory after attach(), unlike on the replicas, and the first pass makes them equal."""
    with torch.device("meta"):
        empty = net()
    model, _, mesh = attached(kind, "topk:ratio=0.1", empty)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for each in model.parameters():
            each.to_local().normal_(std=0.1)
    train(model)
    return model, mesh


def with_odd_buffers(kind: str) -> Any:
    model = net(dist.get_rank() // 2)
    for form in (torch.int16, torch.bool, torch.complex64, torch.float64, torch.float8_e4m3fn):
        model.register_buffer(str(form).partition(".")[2], torch.full((3,), dist.get_rank() // 2).to(form))
    model.register_buffer("scalar", torch.tensor(float(dist.get_rank() // 2)))
    model, _, mesh = attached(kind, "topk:ratio=0.1", model)
    assert all(not each.to(torch.complex64).any() for each in model.buffers())
    train(model)
    return model, mesh


PROGRAMS = [
    a_failed_step_and_a_change,
    replaced_in_part,
    replaced_before_a_change,
    memory_after,
    with_odd_buffers,
    momentum_clip_and_foreach,
    accumulated,
    two_passes_and_kept_gradients,
    frozen_and_thawed,
    changed,
    sharded_by_columns,
    offloaded,
    in_bfloat16,
    scaled_by_a_sum,
    loaded_after,
    not_finite_on_one_rank,
]


def programs(kind: str) -> dict[str, tuple[bool, bool]]:
    join()
    found = {}
    for program in PROGRAMS:
        model, mesh = program(kind)
        finite = all(bool(each.isfinite().all()) for each in shards_of(model).values())
        found[program.__name__] = are_equal(model, mesh), finite
    return found


@once
def of_programs(kind: str) -> list[dict[str, tuple[bool, bool]]]:
    return launch(programs, RANKS, kind, seconds=120)


@pytest.mark.parametrize("program", [each.__name__ for each in PROGRAMS])
@pytest.mark.parametrize("kind", ["two by two", HIDDEN])
def test_replicas_stay_equal(kind: str, program: str) -> None:
    for rank in of_programs(kind):
        assert rank[program] == (True, True)
