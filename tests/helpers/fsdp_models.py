"""Models under FSDP2 on four ranks: shards of four, four replicas of one shard, two by two, and replicate()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradcomp.fsdp

RANKS = 4
MESHES = ["shards", "two by two", "one shard", "replicate"]
REPLICATED = MESHES[1:]
# Besides the meshes that have replicas: those whose modules know the shards alone, of which there are two, or one.
HIDDEN, ALL_HIDDEN = "replicas hidden", "replicas of one shard hidden"
KINDS = [*REPLICATED, HIDDEN, ALL_HIDDEN]


def mesh_of(kind: str) -> DeviceMesh:
    """Make a mesh."""
    if kind == "shards":
        return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
    if kind == "replicate":
        return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("replicate",))
    sizes = (2, 2) if kind == "two by two" else (RANKS, 1)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


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


def attached(kind: str, spec: str, model: nn.Sequential | None = None, **options: Any) -> tuple[Any, Any, DeviceMesh]:
    """Return a model on a mesh, its handle, and the mesh. Replicas begin unlike."""
    model = net(dist.get_rank() // 2) if model is None else model
    if kind not in (HIDDEN, ALL_HIDDEN):
        mesh = mesh_of(kind)
        model = wrapped(kind, model, mesh, **options)
        return model, gradcomp.fsdp.attach(model, spec), mesh
    mesh = mesh_of("two by two" if kind == HIDDEN else "one shard")
    model = wrapped("two by two", model, mesh["shard"], **options)
    return model, gradcomp.fsdp.attach(model, spec, replicas=mesh["replicate"]), mesh


def shards_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.to_local().detach().clone() for name, each in model.named_parameters()}


def are_equal(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Decide whether all replicas have the same shards, to the bit."""
    equal = True
    for each in shards_of(model).values():
        first = each.clone()
        dist.broadcast(first, dist.get_global_rank(mesh.get_group("replicate"), 0), mesh.get_group("replicate"))
        equal &= torch.equal(each, first)
    return equal


def mean(arrays: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    for each in arrays.values():
        dist.all_reduce(each, group=mesh.get_group("replicate"))
    return {name: each / mesh["replicate"].size() for name, each in arrays.items()}


def train(model: Any, steps: int = 3, act: Callable[[int, Any], Any] | None = None, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for step in range(steps):
        optimizer.zero_grad()
        if act is None:
            loss(model, inputs(step)[dist.get_rank()]).backward()
        else:
            act(step, optimizer)
        optimizer.step()


def assigned(model: Any, names: Sequence[str], value: float = 0.0) -> None:
    """Give a model other parameters in place of these."""
    state = {n: each.detach().clone() + value for n, each in model.named_parameters() if n in names}
    model.load_state_dict(state, strict=False, assign=True)
