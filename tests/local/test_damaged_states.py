"""Damaged states of local steps: refused whole, by a ValueError before anything is loaded, or harmless."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradcomp

COUNT = 250


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def is_int(value: Any) -> bool:
    return type(value) is int


# What befalls one value of a state, by what it befalls. None: the value is gone.
DAMAGE: dict[str, tuple[Callable[[Any], bool], Callable[[Any], Any] | None]] = {
    "gone": (lambda value: True, None),
    "nan": (is_float, lambda value: value * math.nan),
    "an infinity": (is_float, lambda value: torch.full_like(value, math.inf)),
    "one entry": (lambda value: isinstance(value, Tensor) and value.numel() > 1, lambda value: value.reshape(-1)[:1]),
    "flat": (lambda value: isinstance(value, Tensor) and value.ndim > 1, lambda value: value.reshape(-1)),
    "another type": (is_float, lambda value: value.double()),
    "text": (lambda value: True, lambda value: "x"),
    "nothing": (lambda value: True, lambda value: None),
    "negative": (is_int, lambda value: -5),
    "huge": (is_int, lambda value: 10**30),
    "half": (is_int, lambda value: 2.5),
    "more": (lambda value: isinstance(value, dict), lambda value: {**value, "more": 1}),
}


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(seed: int) -> tuple[nn.Module, gradcomp.local.LocalSteps]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, gradcomp.local.LocalSteps(model, optimizer, "sign", every=4, fragments=2)


def train(model: nn.Module, local: gradcomp.local.LocalSteps, steps: range) -> None:
    for step in steps:
        local.zero_grad()
        model(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        local.step()


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Go through the places of all values in a state."""
    if at:
        yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*at, key))


def damaged(state: Any, at: tuple[Any, ...], damage: str) -> Any:
    """Return a copy with one damaged value; None if this damage cannot befall it."""
    state = parent = copy.deepcopy(state)
    for key in at[:-1]:
        parent = parent[key]
    befalls, new = DAMAGE[damage]
    if not befalls(parent[at[-1]]):
        return None
    if new is None:
        del parent[at[-1]]
    else:
        parent[at[-1]] = new(parent[at[-1]])
    return state


def everything(model: nn.Module, local: gradcomp.local.LocalSteps) -> list[Tensor]:
    starts = [each for fragment in local._fragments for each in fragment.starts.values()]
    return [each.detach().clone() for each in (*model.parameters(), *model.buffers(), *starts)]


def outcomes(count: int, seed: int = 0) -> Counter[str]:
    """Load so many damaged states, each into a fresh model. Return what came of them."""
    model, local = made(0)
    train(model, local, range(7))
    good, found = local.state_dict(), Counter[str]()
    drawn = [(at, damage) for at in places(good) for damage in DAMAGE]
    random.Random(seed).shuffle(drawn)
    for at, damage in drawn:
        if sum(found.values()) == count:
            break
        if (state := damaged(good, at, damage)) is None:
            continue
        where = "/".join(map(str, at)) + ": " + damage
        model, local = made(1)
        before = everything(model, local)
        try:
            local.load_state_dict(state)
        except ValueError:
            whole = all(map(torch.equal, before, everything(model, local))) and not local._optimizer.state
            found["refused" if whole else f"half loaded, {where}"] += 1
            continue
        train(model, local, range(7, 10))
        harmless = all(bool(each.isfinite().all()) for each in everything(model, local))
        found["harmless" if harmless else f"not finite, {where}"] += 1
    return found


@pytest.mark.usefixtures("alone")
def test_damage_is_refused_whole_or_harmless() -> None:
    assert outcomes(COUNT).keys() == {"refused", "harmless"}
