"""Damaged states of one rank of two, by each integration: refused whole on both ranks, by a ValueError, or harmless on both."""

from __future__ import annotations

import copy
import functools
import math
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import horovod.torch as hvd
import pytest
import ranks
import torch
import torch.distributed as dist
from doors import COMPRESSION, DDP, OWN, Training
from fsdp_models import inputs, loss, wrapped
from fsdp_models import net as fsdp_net
from small_net import net, weights
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gradcomp
import gradcomp.fsdp

# Of each integration.
COUNT = 30


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def is_int(value: Any) -> bool:
    return type(value) is int


def is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not hasattr(value, "to_local")


# What befalls one value of a state, by what it befalls. None: the value is gone.
DAMAGE: dict[str, tuple[Callable[[Any], bool], Callable[[Any], Any] | None]] = {
    "gone": (lambda value: True, None),
    "nan": (is_float, lambda value: value * math.nan),
    "an infinity": (is_float, lambda value: value * 0 + math.inf),
    "one entry": (lambda value: is_plain(value) and value.numel() > 1, lambda value: value.reshape(-1)[:1]),
    "flat": (lambda value: is_plain(value) and value.ndim > 1, lambda value: value.reshape(-1)),
    "another type": (is_float, lambda value: value.double()),
    "a history": (is_float, lambda value: value.requires_grad_() * 1),
    "sparse": (is_plain, lambda value: value.to_sparse()),
    "without memory": (is_plain, lambda value: value.to("meta")),
    "below zero": (is_float, lambda value: -value.abs()),
    "text": (lambda value: True, lambda value: "x"),
    "nothing": (lambda value: True, lambda value: None),
    "object": (lambda value: True, lambda value: object()),
    "negative": (is_int, lambda value: -5),
    "huge": (is_int, lambda value: 10**30),
    "half": (is_int, lambda value: 2.5),
    "later": (is_int, lambda value: value + 1),
    "more": (lambda value: isinstance(value, dict), lambda value: {**value, "more": 1}),
    "none of it": (lambda value: isinstance(value, (dict, list)), lambda value: type(value)()),
}


class Trained(NamedTuple):
    """A training by one integration. train: takes so many steps, and returns weights that are equal on all ranks."""

    handle: Any
    train: Callable[[int], Tensor]


def by_door(door: str, spec: str, **options: Any) -> Trained:
    run = Training(door, net(width=12), spec, bucket_mb=0.001, **options)
    return Trained(run.handle, run.train)


def by_local_steps() -> Trained:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    local = gradcomp.local.LocalSteps(model, torch.optim.AdamW(model.parameters(), lr=0.01), "sign", every=4, fragments=2)

    def train(steps: int) -> Tensor:
        for _ in range(steps):
            local.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            local.step()
        starts = [each.flatten() for fragment in local._fragments for each in fragment.starts.values()]
        assert weights(model).isfinite().all()
        return torch.cat(starts)

    return Trained(local, train)


def by_fsdp() -> Trained:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = wrapped("one shard", fsdp_net(), mesh["shard"])
    handle = gradcomp.fsdp.attach(model, "topk:ratio=0.1", replicas=mesh["replicate"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(steps: int) -> Tensor:
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, inputs(step)[dist.get_rank()]).backward()
            optimizer.step()
        local: list[Any] = [*model.parameters()]
        return torch.cat([each.to_local().detach().flatten() for each in local])

    return Trained(handle, train)


def by_simulation() -> Trained:
    simulation = gradcomp.Simulation("topk:ratio=0.1,by_host=true,momentum=0.9", {"a": (6, 8), "b": (40,)}, 2, ranks_per_host=2)
    draws = torch.Generator().manual_seed(0)

    def train(steps: int) -> Tensor:
        for _ in range(steps):
            grads = [{"a": torch.randn(6, 8, generator=draws), "b": torch.randn(40, generator=draws)} for _ in range(2)]
            update = simulation.step(grads)
        return torch.cat([each.flatten() for each in update.values()])

    return Trained(simulation, train)


INTEGRATIONS: dict[str, Callable[[], Trained]] = {
    "DDP, topk": lambda: by_door(DDP, "topk:ratio=0.05; *.bias=dense", momentum=0.9),
    "DDP, lgc": lambda: by_door(DDP, "lgc:dense=1,learn=2,ratio=0.02,window=64"),
    "DDP, auto": lambda: by_door(DDP, "auto:loss=high"),
    "Horovod, sdagc": lambda: by_door(COMPRESSION, "sdagc:density=0.05,small=none", momentum=0.9),
    "Horovod, orq": lambda: by_door(OWN, "orq"),
    "FSDP2": by_fsdp,
    "local steps": by_local_steps,
    "a simulation": by_simulation,
}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Go through the places of all values in a state."""
    if at:
        yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*at, key))


def damaged(state: Any, at: tuple[Any, ...], damage: str) -> Any:
    """Return a copy with one damaged value; None if this damage cannot befall it."""
    befalls, new = DAMAGE[damage]
    if not befalls(functools.reduce(operator.getitem, at, state)):
        return None
    state = copy.deepcopy(state)
    parent = functools.reduce(operator.getitem, at[:-1], state)
    if new is None:
        del parent[at[-1]]
    else:
        parent[at[-1]] = new(parent[at[-1]])
    return state


def bits(value: Any) -> Any:
    """Replace tensors by their bytes, so that == compares."""
    if isinstance(value, Tensor):
        return getattr(value, "to_local", lambda: value)().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    return [bits(each) for each in value] if isinstance(value, (list, tuple)) else repr(value)


def from_all(own: Any) -> list[Any]:
    every: list[Any] = [None] * 2
    dist.all_gather_object(every, own)
    return every


def outcomes_of(integration: str, count: int = COUNT, seed: int = 0) -> Counter[str]:
    """Load so many damaged states into one training, each on one of the ranks. Return what came of them."""
    handle, train = INTEGRATIONS[integration]()
    train(6)
    good, found = handle.state_dict(), Counter[str]()
    train(2)
    drawn = [(at, damage) for at in places(good) for damage in DAMAGE if at[0] != "optimizer" or damage != "below zero"]
    random.Random(seed).shuffle(drawn)
    for i, (at, damage) in enumerate(drawn):
        if sum(found.values()) == count:
            break
        if (state := damaged(good, at, damage)) is None:
            continue
        where = "/".join(map(str, at)) + ": " + damage
        before = bits(handle.state_dict())
        try:
            handle.load_state_dict(state if dist.get_rank() == i % 2 or isinstance(handle, gradcomp.Simulation) else good)
            own = "harmless"
        except ValueError as error:
            own = "refused" if bits(handle.state_dict()) == before else f"half loaded, {where}: {error}"
        except Exception as error:
            own = f"{type(error).__name__}, {where}: {error}"
        every = from_all(own)
        found[own if every == [own] * 2 else f"{every}, {where}"] += 1
        now = train(1)
        if not now.isfinite().all() or not all(torch.equal(now, other) for other in from_all(now)):
            found[f"parted, or not finite, {where}: {own}"] += 1
    return found


def program() -> dict[str, Counter[str]]:
    ranks.join()
    hvd.init()
    return {integration: outcomes_of(integration) for integration in INTEGRATIONS}


found = ranks.once(lambda: ranks.launch(program, 2))


@pytest.mark.parametrize("integration", INTEGRATIONS)
def test_damage_is_refused_whole_or_harmless(integration: str) -> None:
    for own in found():
        assert own[integration].keys() == {"refused", "harmless"}, own[integration]
