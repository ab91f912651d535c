"""The table of memory has what a handle keeps for each parameter, under DDP and under Horovod."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from documents import ROOT
from ranks import join, launch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

PAGE = (ROOT / "docs" / "which-spec.md").read_text().partition("\n## How much memory")[2].partition("\n## ")[0]
LAYERS, WIDTH, STEPS = 2, 512, 10
OPTIMIZERS = {
    "SGD": (lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9), 4),
    "AdamW": (torch.optim.AdamW, 8),
}
# Those of the page that exchange gradients. Under the others, SGD's momentum is in the residual.
OF_GRADIENTS = ("dense", "half", "blocks", "bingrad", "linear")
# Arrays that any bucket may use, by the names of their uses.
SCRATCH = "_scratch"


def parts(each: Any) -> Iterator[tuple[str, Any]]:
    """List what an object has, by name."""
    if isinstance(each, dict):
        yield from ((str(key), value) for key, value in each.items())
    elif isinstance(each, list | tuple | set | frozenset):
        yield from (("", value) for value in each)
    elif not isinstance(each, str | type | ModuleType | FunctionType | nn.Module | torch.optim.Optimizer):
        yield from getattr(each, "__dict__", {}).items()
        slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
        yield from ((name, getattr(each, name)) for name in slots if hasattr(each, name))


def arrays(root: Any) -> dict[int, tuple[int, bool]]:
    """List the arrays that an object leads to, by address: their bytes, and whether they are scratch."""
    found: dict[int, tuple[int, bool]] = {}
    waiting, seen = [(root, False)], set()
    while waiting:
        each, is_scratch = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes(), is_scratch
        else:
            waiting += [(value, is_scratch or name == SCRATCH) for name, value in parts(each)]
    return found


def all_kept(cases: list[tuple[str, str]], door: str) -> list[tuple[float, float, float]]:
    """Train with each spec and kind of optimizer on this rank, and measure."""
    hvd.init()
    join()
    torch.set_num_threads(1)
    return [kept(spec, kind, door) for spec, kind in cases]


def kept(spec: str, kind: str, door: str) -> tuple[float, float, float]:
    """Train. Return bytes a parameter: what gradcomp keeps, its scratch, and what the optimizer has."""
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if door == "ddp":
        model = DistributedDataParallel(model)
    optimizer = own = OPTIMIZERS[kind][0](model.parameters())
    if door == "ddp":
        handle: Any = gradcomp.ddp.attach(model, spec)
    else:
        optimizer = gradcomp.horovod.DistributedOptimizer(own, model.named_parameters(), spec)
        handle = optimizer.compression
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    count = sum(each.numel() for each in model.parameters())
    found = own_of(handle, model, optimizer)
    return found[False] / count, found[True] / count, sum(each.nbytes for each in state_of(optimizer)) / count


def state_of(optimizer: Any) -> list[torch.Tensor]:
    return [each for of_one in optimizer.state.values() for each in of_one.values() if isinstance(each, torch.Tensor)]


def own_of(handle: Any, model: Any, optimizer: Any) -> dict[bool, int]:
    """Add up the bytes that a handle alone leads to: not scratch, and scratch."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    found = arrays(handle)
    of_ddp = [each.buffer for each in model._comm_hooks[-1][1].contents.values()] if hasattr(model, "_comm_hooks") else []
    for each in (*model.parameters(), *gradients, *of_ddp, *state_of(optimizer)):
        found.pop(each.untyped_storage().data_ptr(), None)
    return {which: sum(size for size, is_scratch in found.values() if is_scratch == which) for which in (False, True)}


def figure(spec: str) -> float:
    (found,) = re.findall(rf"^\|[^|]*`{spec}`[^|]*\| ([\d.]+) \|", PAGE, re.MULTILINE)
    return float(found)


CASES = {
    "ddp": [
        *((spec, kind) for spec in ("blocks", "orq", "topk", "sdagc", "gs_sgd") for kind in OPTIMIZERS),
        *(
            (spec, "SGD")
            for spec in ("dense", "half", "bingrad", "qsgd", "terngrad", "linear", "sign", "gtopk", "sketched_sgd")
        ),
    ],
    "horovod": [("topk", "AdamW"), ("blocks", "SGD")],
}


@pytest.mark.parametrize("door", CASES)
def test_what_a_handle_keeps(door: str) -> None:
    measured = launch(all_kept, 2, CASES[door], door)[0]
    for (spec, kind), (own, scratch, of_optimizer) in zip(CASES[door], measured, strict=True):
        has_momentum = kind == "AdamW" or spec in OF_GRADIENTS
        assert of_optimizer == pytest.approx(OPTIMIZERS[kind][1] if has_momentum else 0, abs=0.01), (spec, kind)
        assert own == pytest.approx(figure(spec), abs=0.13), (spec, kind)  # and samples of Adam's updates
        assert scratch <= (5.6 if "sgd" in spec and spec != "qsgd" else 1.6 if figure(spec) > 9 else 0.03), (spec, kind)
    assert {spec for spec, _ in CASES["ddp"]} == {
        *re.findall(r"`(\w+)`", "".join(re.findall(r"^\|[^|]*\| \d", PAGE, re.MULTILINE)))
    }


def test_the_pages_sizes_are_those_of_its_bytes() -> None:
    rows = re.findall(r"\| ([\d.]+) \| [^|]+ \| ([\d.]+) GB \|", PAGE)
    assert len(rows) == 4 and all(f"{float(each) / 10:.1f}" == size for each, size in rows)
