"""The door for FSDP2: attach() compresses the reduce-scatter over shards, and the all-reduce over replicas.

fully_shard() and replicate() reduce the gradients of each module as soon as they are complete. Over shards, attach() replaces
the reduce-scatter by torch's own interface for that. Over replicas, the mesh must have the backend "gradcomp" on that
dimension: torch has no other way to replace the all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._composable.contract import _get_registry
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    _set_reduce_scatter = FSDPModule.set_custom_reduce_scatter
except (ImportError, AttributeError) as error:
    text = f"gradcomp.fsdp needs torch 2.9 or newer: the FSDP2 of torch {torch.__version__} takes no custom reduce-scatter"
    raise ImportError(text) from error

from gradcomp.core.compressor import Compressor
from gradcomp.engine.modules import Axes, ModuleSession, ModuleSlot, ModuleSlots
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.updates.steps import inform, warn_user
from gradcomp.handle import Handle
from gradcomp.networks import replicas
from gradcomp.networks.replicas import ReplicaGroup
from gradcomp.networks.torch import TorchNetwork, reduce_scatter
from gradcomp.saved import read_int
from gradcomp.saved import table as read_table
from gradcomp.spec import Auto
from gradcomp.telemetry.observer import Intervals, Writer

__all__ = ["attach"]

replicas.register()

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
_BACKEND = (
    "the gradients are all-reduced over the mesh's dimension {name!r}, which has the backend {backend}; make the mesh with "
    'init_device_mesh(..., backend_override={{{name!r}: "gradcomp"}}), after import gradcomp.fsdp'
)
_NO_PARAMETER = "attach() got a model without trained parameters; set requires_grad before attach()"
_UNWRAPPED = (
    "the parameters {names} are in no module of FSDP2, so that nobody exchanges their gradients: call fully_shard() on all "
    "layers and on the model before attach()"
)
_TWICE = "the model has been given to attach() already; keep the first handle, and call its change(spec)"
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
_NOT_YET = "auto does not choose over FSDP2; write a spec, such as blocks"
_NO_GRADIENT = (
    "some parameters of {name!r} have no gradient in this step, or were unfrozen after attach(): torch does not say which, and "
    "the module's gradients go over replicas uncompressed. If its parameters are used in some steps only, call "
    "set_reduce_scatter_unused_params(True) on the model; if they were unfrozen, unfreeze them before attach()"
)
_LATE = (
    "{spec} over FSDP2 exchanges gradients, and leaves the momentum to the optimizer, which then sees them late, sparse or "
    "coarse: that costs accuracy. Let the spec be blocks. To go on so without this warning, write momentum=0 into the spec"
)
_OTHER_SPEC = "the state was saved with {theirs!r}, and this exchange has {spec!r}; attach {theirs!r}, load, and call change()"
_OTHER_LAYERS = (
    "the state's {array} and the model have other layers: only the {where} has {name!r}; load the state of this model"
)
_DAMAGED = (
    "the state's {array} of {name!r} is no finite DTensor of its parameter's shape and placement: load with "
    "torch.distributed.checkpoint into the result of state_dict(), or the state is damaged"
)
_NOTHING_TO_WATCH = (
    "watch() follows residuals and updates over replicas, and {spec} exchanges none over this mesh; read the handle's stats()"
)
_NO_STATE = "load_state_dict() got no state of gradcomp.fsdp: it has no {key!r}; pass the result of state_dict(), loaded"
# Specs that act over every axis.
_SUITED = "blocks or half"
_DOOR = Door()  # without a name: attach() says what is exchanged


def attach(model: torch.nn.Module, spec: str | Compressor, *, seed: int = 0) -> Handle:
    """Compress the exchange of a model's gradients, from the next backward pass on. All ranks call it.

    Over shards, specs act that round every entry, such as blocks. Over replicas all do, but for those of the whole
    model. A spec that keeps a residual leaves the reduce-scatter over shards to torch. The momentum stays the optimizer's.

    Args:
        model: The model, after fully_shard() or replicate(), and before training.
        spec: "name:knob=value", or a compressor.
        seed: The seed of random draws, equal on all ranks.

    Returns:
        The handle of the exchange: stats(), residual(), change(), state_dict() and load_state_dict().

    Raises:
        TypeError: The model is none of FSDP2's.
        RuntimeError: The model has been attached to already.
        ValueError: The spec or the model does not fit the mesh, or the ranks do not agree.

    Example:
        >>> for layer in model.layers:
        ...     fully_shard(layer)
        >>> fully_shard(model)
        >>> handle = gradcomp.fsdp.attach(model, "blocks")
    """
    modules = _modules_of(model)
    mesh = _mesh_of(modules)
    slots = [ModuleSlot(name, each.to_local(), each, (of.number, of.device)) for of in modules for name, each in of.named]
    device = modules[0].device
    network = TorchNetwork(mesh.replicas or mesh.any, device)
    shards = network if mesh.replicas is None else TorchNetwork(mesh.any, device)
    axes = Axes(None if mesh.shards is None else shards, mesh.replicas is not None)
    handle = _Handle(spec, ModuleSlots(slots, axes, _SUITED), network, Options(seed=seed), _DOOR)
    session: Any = handle._session
    session.meet()
    if session.slots.are_first:
        inform(f"gradcomp: {session.spec} over FSDP2 exchanges {session.reducer.exchanges}", network)
    own = {id(each) for of in modules for _, each in of.named}
    if unwrapped := [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in own]:
        warn_user(_UNWRAPPED.format(names=", ".join(map(repr, unwrapped[:3])) + (" and others" if len(unwrapped) > 3 else "")))
    if session.reducer.delays_gradients:
        warn_user(_LATE.format(spec=session.spec))
    for module in modules:
        reduction: Any = _Reduction(session, module, mesh.replicas)
        _set_reduce_scatter(module.fsdp_module, reduction)
    return handle


class _Handle(Handle):
    """The handle of an exchange over FSDP2. Its state is for torch.distributed.checkpoint."""

    _session_class = ModuleSession
    _session: ModuleSession

    def _watch(self, writers: Sequence[Writer], intervals: Intervals) -> None:
        if not self._session.reducer.slots:
            raise ValueError(_NOTHING_TO_WATCH.format(spec=self._session.spec))
        super()._watch(writers, intervals)

    def _choose(self, auto: Auto | None) -> None:
        if auto is not None:
            raise ValueError(_NOT_YET)
        super()._choose(auto)

    def state_dict(self) -> dict[str, Any]:
        """Copy what stays from step to step: DTensors on the parameters' mesh. All ranks call it.

        Residuals of replicas are saved as their mean, so that any number of shards and replicas can load them. A compressor's
        own state, such as a threshold, is not saved.

        Returns:
            The state, for torch.distributed.checkpoint.save() or load().

        Raises:
            RuntimeError: The call came in the middle of a step.

        Example:
            >>> dcp.save({"model": model.state_dict(), "gradcomp": handle.state_dict()}, checkpoint_id=folder)
        """
        session = self._session
        session.refuse("state_dict()")
        arrays = {
            array: {name: _like(session.slots.parameters[name], each) for name, each in means.items()}
            for array, means in session.means().items()
        }
        return {"spec": session.spec, "steps": session.reducer.steps_done, **arrays}

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state, with the same spec and model, on any mesh. All ranks call it, between two steps.

        Args:
            state: The result of state_dict(), loaded by torch.distributed.checkpoint.

        Raises:
            ValueError: The state does not fit. Nothing of it is loaded.

        Example:
            >>> state = {"gradcomp": handle.state_dict()}
            >>> dcp.load(state, checkpoint_id=folder)
            >>> handle.load_state_dict(state["gradcomp"])
        """
        session = self._session
        for key in ("spec", "steps"):
            if not isinstance(state, Mapping) or key not in state:
                raise ValueError(_NO_STATE.format(key=key))
        if state["spec"] != session.spec:
            raise ValueError(_OTHER_SPEC.format(theirs=state["spec"], spec=session.spec))
        means: dict[str, dict[str, Any]] = {}
        for array, views in session.reducer.arrays().items():
            table = read_table(state, array) if array in state else {}
            for name in views.keys() ^ table.keys():
                if name in table or views[name].numel():  # an older version left out what a rank has nothing of
                    raise ValueError(_OTHER_LAYERS.format(array=array, name=name, where="model" if name in views else "state"))
            means[array] = {name: getattr(each, "to_local", lambda: None)() for name, each in table.items()}
            for name, part in means[array].items():
                if not session.fits(name, part) or table[name].shape != session.slots.parameters[name].shape:
                    raise ValueError(_DAMAGED.format(array=array, name=name))
        session.load_means(means, read_int(state, "steps"))


def _like(parameter: Any, local: Tensor) -> DTensor:
    """Make a DTensor of a local part, on the mesh of a parameter."""
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


class _Mesh(NamedTuple):
    """The groups over which all modules' gradients are reduced; None for an axis of one rank. any: a group of the mesh."""

    shards: dist.ProcessGroup | None
    replicas: ReplicaGroup | None
    any: dist.ProcessGroup


@dataclass
class _Module:
    """A module that reduces its gradients by itself.

    number: its place in the model. device: of its gradients, also where its parameters are offloaded. named: its trained
    parameters, with their names. sizes: their entries in the flat tensor of a rank's gradients, with padding. frozen: torch's
    records of the other parameters.
    """

    number: int
    name: str
    fsdp_module: FSDPModule
    mesh_info: Any
    device: torch.device
    named: list[tuple[str, Any]]
    sizes: list[int]
    frozen: list[Any]


def _modules_of(model: torch.nn.Module) -> list[_Module]:
    """Find the modules that reduce gradients."""
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
    modules: list[_Module] = []
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
            _check_reduce_scatter(name or "the model", group._reduce_scatter_comm)
            trained = [(own, each) for each in group.fsdp_params if (own := _parameter_of(each)).requires_grad]
            named = [(names[id(own)], own) for own, _ in trained]
            sizes = [each.padded_sharded_param_size.numel() for _, each in trained]
            frozen = [each for each in group.fsdp_params if not _parameter_of(each).requires_grad]
            facts = name or "the model", each, group.mesh_info, group.device, named, sizes, frozen
            modules.append(_Module(len(modules), *facts))
    if not any(module.named for module in modules):
        raise ValueError(_NO_PARAMETER)
    return modules


def _parameter_of(fsdp_param: Any) -> Any:
    """Return the parameter that a module has now: load_state_dict(assign=True) replaces it, and torch notices that later."""
    info = fsdp_param._module_info
    return getattr(info.module, info.param_name)


def _check_reduce_scatter(name: str, present: object) -> None:
    """Refuse a module with a reduce-scatter other than torch's own."""
    if isinstance(present, _Reduction):
        raise RuntimeError(_TWICE)
    if type(present).__name__ != "DefaultReduceScatter":
        raise ValueError(_CUSTOM.format(name=name, kind=type(present).__name__))


def _mesh_of(modules: Sequence[_Module]) -> _Mesh:
    """Find the groups of all modules, which must be the same."""
    meshes = [_groups_of(each) for each in modules]
    for module, mesh in zip(modules, meshes, strict=True):
        if mesh != meshes[0]:
            raise ValueError(_MESHES.format(first=modules[0].name, second=module.name))
    return meshes[0]


def _groups_of(module: _Module) -> _Mesh:
    info = module.mesh_info
    groups: tuple[Any, Any] = (getattr(info, "shard_process_group", None), getattr(info, "replicate_process_group", None))
    shards, replicated = groups
    several = replicated is not None and replicated.size() > 1
    if several and not isinstance(replicated, ReplicaGroup):
        names = info.mesh.mesh_dim_names
        name = names[info.replicate_mesh_dim] if names else info.replicate_mesh_dim
        raise ValueError(_BACKEND.format(name=name, backend=dist.get_backend(replicated)))
    return _Mesh(
        shards if shards is not None and shards.size() > 1 else None, replicated if several else None, shards or replicated
    )


class _Reduction:
    """The reductions of one module's gradients: torch's interface of a custom reduce-scatter, and the all-reduce after it."""

    def __init__(self, session: ModuleSession, module: _Module, replicated: ReplicaGroup | None):
        self._session, self._module, self._replicas = session, module, replicated
        self._slots = [slot for slot in session.slots.slots if slot.module == module.number]
        self._has_warned = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a tensor. The last one before an all-reduce over replicas is the one that is reduced."""
        tensor = torch.empty(size, dtype=dtype, device=device)
        if self._replicas is not None:
            self._replicas.announce(tensor, self._over_replicas)
        return tensor

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce the module's gradients over shards, each rank's part to that rank."""
        if self._session.reducer.scatter is not None:
            self._session.scatter(self._module.number, input_tensor, output_tensor, _scale(op, group.size()))
            return
        sent = (input_tensor.numel() - output_tensor.numel()) * input_tensor.itemsize
        over = self._session.slots.axes.shards
        assert over is not None
        self._session.run_native(lambda: reduce_scatter(output_tensor, input_tensor, op, group), sent, over)

    def _over_replicas(self, tensor: Tensor, opts: Any) -> None:
        """Exchange the module's gradients over replicas."""
        assert self._replicas is not None
        replicated, reducer = self._replicas, self._session.reducer
        trained = [*zip(self._slots, self._module.sizes, strict=True)]
        trained = [(slot, size) for slot, size in trained if slot.parameter.requires_grad]
        if reducer.is_native or not self._holds(tensor, sum(size for _, size in trained)):
            sent = tensor.numel() * tensor.itemsize
            over = self._session.network
            self._session.run_native(lambda: _finish(replicated.allreduce_natively([tensor], opts)), sent, over)
            return
        parts = tensor.split([size for _, size in trained])
        slots = [slot for slot, _ in trained]
        grads = [part[: slot.layer.size] for slot, part in zip(slots, parts, strict=True)]
        self._session.exchange(self._module.number, slots, grads, _scale(opts.reduceOp, replicated.size()))

    def _holds(self, tensor: Tensor, trained: int) -> bool:
        """Say whether a tensor has the gradients of all parameters that are trained now, of so many entries. Warn once."""
        unfrozen = any(_parameter_of(each).requires_grad for each in self._module.frozen)
        holds = trained == tensor.numel() and not unfrozen
        if not (holds or self._has_warned):
            self._has_warned = True
            warn_user(_NO_GRADIENT.format(name=self._module.name))
        return holds


def _finish(work: dist.Work | None) -> None:
    """Wait for an operation. NCCL's that began on the current stream is no object, and needs no wait."""
    if work is not None:
        work.wait()


def _scale(op: Any, ranks: int) -> float:
    """Return the factor from the mean over ranks to a reduction."""
    if op == dist.ReduceOp.AVG:
        return 1.0
    if op == dist.ReduceOp.SUM:
        return float(ranks)
    factor: float = op.__getstate__()[1]  # of PREMUL_SUM, which has no other way to tell it
    return factor * ranks


def __dir__() -> list[str]:
    return __all__
