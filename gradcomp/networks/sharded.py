"""The modules of an FSDP2 model, and the process groups over which their gradients are reduced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._composable.contract import _get_registry
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo

    set_reduce_scatter, set_all_gather = FSDPModule.set_custom_reduce_scatter, FSDPModule.set_custom_all_gather
except (ImportError, AttributeError) as error:
    text = f"gradcomp.fsdp needs torch 2.9 or newer: the FSDP2 of torch {torch.__version__} takes no custom reduce-scatter"
    raise ImportError(text) from error

_NO_MODULE = (
    "attach() got a {name} without any module of FSDP2: call torch.distributed.fsdp.fully_shard(), or replicate() of "
    "torch.distributed._composable.replicate_with_fsdp, on its layers and on itself first"
)
_OTHER_KINDS: Sequence[tuple[type, str]] = (
    (
        FullyShardedDataParallel,
        "attach() got a model of FSDP1; wrap it by fully_shard() of torch.distributed.fsdp, which is FSDP2",
    ),
    (DistributedDataParallel, "attach() got a DistributedDataParallel model; call gradcomp.ddp.attach()"),
)
_OLD_REPLICATE = (
    "attach() got a model of the older replicate() of torch.distributed._composable; take that of "
    "torch.distributed._composable.replicate_with_fsdp, or gradcomp.ddp.attach() on a DistributedDataParallel model"
)
_TWO_REPLICAS = "the mesh of the modules has replicas already; leave out replicas=, or shard over the other dimension alone"
_NO_GROUP = 'replicas= is a {name}; pass a process group, or a mesh of one dimension, such as mesh["replicate"]'
_NO_REPLICAS = (
    'replicas= has ranks with other shards than this one\'s: pass those that have the same, such as mesh["replicate"] where '
    'fully_shard() got mesh["shard"]'
)
_HOOK = "the module {name!r} has an all-reduce hook of its own: with replicas leave out set_all_reduce_hook()"
_NO_PARAMETER = "attach() got a model without trained parameters; set requires_grad before attach()"
_TWICE = "the model has been given to attach() already; keep the first handle, and call its set_spec(spec)"
_CUSTOM = (
    "the module {name!r} has a reduce-scatter of its own, {kind}; leave out set_custom_reduce_scatter(), "
    "set_allocate_memory_from_process_group_for_comm() and set_symm_mem_for_comm(): torch allows one reduce-scatter"
)
_MESHES = (
    "the modules {first!r} and {second!r} are on different meshes; attach() serves one mesh: leave one of them out of "
    "fully_shard(), or give both the same mesh"
)
_GROUPS = (
    "the module {name!r} has parameters on several meshes, by its shard_placement_fn, and torch then refuses a custom "
    "reduce-scatter; give its parameters one mesh"
)

_GONE = (
    'the backend "gradcomp" is no longer needed: leave it out of init_device_mesh(backend_override=...); attach() finds the '
    "replicas of a mesh"
)


def _refuse(*_: Any) -> Any:
    raise ValueError(_GONE)


# A name of older versions: torch alone would call it unknown.
if not hasattr(dist.Backend, "GRADCOMP"):
    dist.Backend.register_backend("gradcomp", _refuse, extended_api=True, devices=["cpu", "cuda"])


class Mesh(NamedTuple):
    """The groups over which all modules' gradients are reduced; None for an axis of one rank. any: a group of the mesh."""

    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    any: dist.ProcessGroup


@dataclass
class Module:
    """A module that reduces its gradients by itself.

    number: its place in the model. group: torch's, of its parameters. device: of its gradients, also where its parameters are
    offloaded. named: of its parameters the names, and functions that return those of now.
    """

    number: int
    name: str
    fsdp_module: FSDPModule
    group: Any
    device: torch.device
    named: list[tuple[str, Callable[[], Any]]]

    @property
    def shards(self) -> list[tuple[int, int]]:
        """The entries of a rank's shard of each parameter, padded to those of the longest, and the parameter's dimensions."""
        return [(each.padded_sharded_param_size.numel(), len(each._orig_size)) for each in self.group.fsdp_params]

    def that_train(self, trains: bool = True) -> list[tuple[str, Callable[[], Any]]]:
        """Return the parameters that are trained now; or the others."""
        return [(name, find) for name, find in self.named if find().requires_grad is trains]


def modules_of(model: torch.nn.Module, ours: type) -> list[Module]:
    """Find the modules that reduce gradients. ours: the class of a reduction that another call has set."""
    for kind, text in _OTHER_KINDS:
        if any(isinstance(each, kind) for each in model.modules()):
            raise TypeError(text)
    every = [(name, each) for name, each in model.named_modules() if isinstance(each, FSDPModule)]
    if not every:
        old = any("replicate" in (_get_registry(each) or {}) for each in model.modules())
        raise TypeError(_OLD_REPLICATE if old else _NO_MODULE.format(name=type(model).__name__))
    for _, each in every:
        each.reshard()  # parameters are shards then
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules: list[Module] = []
    seen: set[int] = set()
    for name, each in every:
        state: Any = each._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]  # torch < 2.12
        if len(groups) > 1:
            raise ValueError(_GROUPS.format(name=name))
        for group in groups:
            if group is None or id(group) in seen:  # of several modules in one call of fully_shard()
                continue
            seen.add(id(group))
            _check_reduce_scatter(name or "the model", group._reduce_scatter_comm, ours)
            finds = [functools.partial(_parameter_of, each) for each in group.fsdp_params]
            named: list[tuple[str, Callable[[], Any]]] = [(names[id(find())], find) for find in finds]
            modules.append(Module(len(modules), name or "the model", each, group, group.device, named))
    if not any(module.that_train() for module in modules):
        raise ValueError(_NO_PARAMETER)
    return modules


def _parameter_of(fsdp_param: Any) -> Any:
    """Return the shard that a module has now: load_state_dict(assign=True) replaces it, and torch notices that later.

    Between its forward and its backward pass, a module may have the whole parameter.
    """
    if fsdp_param.sharded_state.name != "SHARDED":
        return fsdp_param.sharded_param
    info = fsdp_param._module_info
    return getattr(info.module, info.param_name)


def _check_reduce_scatter(name: str, present: object, ours: type) -> None:
    """Refuse a module with a reduce-scatter other than torch's own."""
    if isinstance(present, ours):
        raise RuntimeError(_TWICE)
    if type(present).__name__ != "DefaultReduceScatter":
        raise ValueError(_CUSTOM.format(name=name, kind=type(present).__name__))


def groups_of(modules: Sequence[Module], replicas: dist.ProcessGroup | None) -> Mesh:
    """Find the groups of all modules, which must be the same. replicas: the user's."""
    meshes = [_groups_of_module(each) for each in modules]
    for module, mesh in zip(modules, meshes, strict=True):
        if mesh != meshes[0]:
            raise ValueError(_MESHES.format(first=modules[0].name, second=module.name))
    mesh = meshes[0]
    if replicas is not None:
        if mesh.replicas is not None:
            raise ValueError(_TWO_REPLICAS)
        own = mesh.shards
        if own is not None and len({*dist.get_process_group_ranks(own)} & {*dist.get_process_group_ranks(replicas)}) > 1:
            raise ValueError(_NO_REPLICAS)
        mesh = mesh._replace(replicas=replicas)
    for module in modules if mesh.replicas is not None else ():
        if getattr(module.group, "_all_reduce_hook", None) is not None:
            raise ValueError(_HOOK.format(name=module.name))
    return mesh


def hide_replicas(group: Any) -> None:
    """Let a module's group of torch's know the shards alone: it all-reduces over no replicas then, and calls its hook."""
    before = group.mesh_info
    if getattr(before, "replicate_process_group", None) is None:
        return
    known = {each.name: getattr(before, each.name) for each in fields(before) if each.init}
    group.mesh_info = (DataParallelMeshInfo if before.shard_mesh_dim is None else FSDPMeshInfo)(**known)
    if group.post_forward_mesh_info is before:
        group.post_forward_mesh_info = group.mesh_info


def restoring(group: Any) -> Callable[[], None]:
    """Return a function that gives a module's group of torch's back what attach() is about to replace."""
    names = ("_reduce_scatter_comm", "_all_gather_comm", "_all_reduce_hook", "mesh_info")
    before = {name: getattr(group, name, None) for name in names}

    def restore() -> None:
        if group.post_forward_mesh_info is group.mesh_info:
            group.post_forward_mesh_info = before["mesh_info"]
        vars(group).update(before)

    return restore


def _groups_of_module(module: Module) -> Mesh:
    info = module.group.mesh_info
    groups: tuple[Any, Any] = (getattr(info, "shard_process_group", None), getattr(info, "replicate_process_group", None))
    shards, replicated = groups
    over, replicas = (each if each is not None and each.size() > 1 else None for each in groups)
    return Mesh(over, replicas, shards or replicated)


def group_of(replicas: Any) -> dist.ProcessGroup | None:
    """Return the process group of the ranks with equal shards, if there are several."""
    if isinstance(replicas, DeviceMesh) and replicas.ndim == 1:
        replicas = replicas.get_group()
    if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(_NO_GROUP.format(name=type(replicas).__name__))
    return replicas if replicas is not None and replicas.size() > 1 else None
