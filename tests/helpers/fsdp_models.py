"""Models under FSDP2 on four ranks: shards of four, four replicas of one shard, two by two, and replicate()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RANKS = 4
MESHES = ["shards", "two by two", "one shard", "replicate"]
REPLICATED = MESHES[1:]
BACKEND = {"replicate": "gradcomp"}


def mesh_of(kind: str, backend: dict[str, str] | None = None) -> DeviceMesh:
    """Make a mesh. backend: of its dimensions, by default gradcomp's for replicas."""
    override: Any = dict(BACKEND if backend is None else backend)  # torch empties it
    if kind == "shards":
        return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
    if kind == "replicate":
        return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("replicate",), backend_override=override)
    sizes = (2, 2) if kind == "two by two" else (RANKS, 1)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"), backend_override=override)


def net(seed: int = 0, width: int = 70) -> nn.Sequential:
    """Make a net with layers that four shards do not divide evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(50, width), nn.Tanh(), nn.Linear(width, 33), nn.Tanh(), nn.Linear(33, 3))


def wrapped(kind: str, model: nn.Sequential, mesh: DeviceMesh | None = None, **options: Any) -> nn.Sequential:
    """Wrap the layers of a net, and the net. reduce_dtype, or other options of fully_shard()."""
    mesh = mesh or mesh_of(kind)
    if "reduce_dtype" in options:
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=options.pop("reduce_dtype"))
    for layer in model:
        if isinstance(layer, nn.Linear):
            wrap_of(kind)(layer, mesh=mesh, **options)
    wrap_of(kind)(model, mesh=mesh, **options)
    return model


def wrap_of(kind: str) -> Callable[..., Any]:
    """Return the function that wraps a module on a mesh."""
    if kind != "replicate":
        return fully_shard
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate


def run_cases(cases: Sequence[Callable[..., Any]], kind: str, spec: str) -> dict[str, Any]:
    """Run cases, each with a mesh and a spec: gradients, wanted ones, a handle. Return errors and figures by name."""
    mesh, found = mesh_of(kind), {}
    for case in cases:
        grads, wanted, handle = case(kind, mesh, spec)
        found[case.__name__] = error(grads, wanted), handle.stats()
    return found


def inputs(step: int, size: int = 8) -> Tensor:
    """Draw the inputs of all ranks in a step."""
    return torch.randn(RANKS, size, 50, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def whole_grads(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a model, put together from all shards. All ranks call it."""
    return {name: each.grad.full_tensor() for name, each in model.named_parameters() if each.grad is not None}


def by_hand(step: int, model: nn.Module | None = None) -> dict[str, Tensor]:
    """Compute the mean gradient of all ranks for net() in one process."""
    model = net() if model is None else model
    model.zero_grad()
    (sum(loss(model, batch) for batch in inputs(step)) / RANKS).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the squared error over the squares."""
    assert found.keys() == wanted.keys()
    squares = sum(float(each.double().square().sum()) for each in wanted.values())
    return sum(float((found[n].double() - wanted[n].double()).square().sum()) for n in wanted) / squares
