"""The integration of FSDP2: attach() compresses its reduce-scatter over shards, all-reduce over replicas, and all-gather.

fully_shard() and replicate() reduce the gradients of each module as soon as they are complete. Over shards, attach() replaces
the reduce-scatter, and the all-gather of weights, by torch's own interfaces for that. Replicas are told to attach(), or are a
dimension of the modules' mesh, which attach() then hides from them: torch has no way to replace its own all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradcomp.core.compressor import Compressor
from gradcomp.core.requests import Reduce
from gradcomp.engine.gathered_weights import TYPES, Division, GatheredWeights, bits_of
from gradcomp.engine.meeting import Membership, run
from gradcomp.engine.modules import ModuleDoor, Modules, ModuleSlot, ModuleSlots, bytes_of_native
from gradcomp.engine.reducer import Options, Stats
from gradcomp.engine.session import Session
from gradcomp.engine.slots import local
from gradcomp.engine.updates.steps import give_up_failed, log_on_rank_0, warn_user
from gradcomp.engine.updates.to_gradients import average_kept
from gradcomp.handle import Handle
from gradcomp.networks.sharded import (
    Mesh,
    Module,
    group_of,
    groups_of,
    hide_replicas,
    modules_of,
    restoring,
    set_all_gather,
    set_reduce_scatter,
)
from gradcomp.networks.torch import TorchNetwork, all_gather, reduce_scatter, share_first
from gradcomp.saved import read_int, reading
from gradcomp.saved import table as read_table
from gradcomp.spec import Auto, make
from gradcomp.telemetry.observer import Intervals, Writer

__all__ = ["attach"]

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_UNWRAPPED = (
    "the parameters {names} are in no module of FSDP2, so that nobody exchanges their gradients: call fully_shard() on all "
    "layers and on the model before attach()"
)
_NOT_YET = "auto does not choose over FSDP2; write a spec, such as blocks"
_LATE = (
    "{spec} over shards rounds gradients coarsely, and the optimizer's momentum accumulates the errors, which costs accuracy. "
    "Use blocks. To keep the spec without this warning, write momentum=0 into it"
)
_OTHER_SPEC = "the state was saved with {theirs!r}, and this exchange has {spec!r}; attach {theirs!r}, load, and call change()"
_OTHER_LAYERS = (
    "the state's residual and the model have other layers: only the {where} has {name!r}; load the state of this model"
)
_DAMAGED = (
    "the state's residual of {name!r} is no finite DTensor of its parameter's shape and placement: load with "
    "torch.distributed.checkpoint into the result of state_dict(), or the state is damaged"
)
_ONE_SHARD = "weights= rounds what the shards gather, and this mesh has one shard: nothing is gathered"
_WHOLE = (
    "the weights of {name!r} travel whole, since torch gathers them as {kind}: weights= rounds modules whose parameters are "
    "all float32, bfloat16 or float16, or become so by MixedPrecisionPolicy(param_dtype=...)"
)
_NOTHING_TO_WATCH = (
    "watch() follows residuals and updates over replicas, and {spec} exchanges none over this mesh; read the handle's stats()"
)
_UNKNOWN_TO_TORCH = (
    "remove() would leave the replicas without an exchange: attach() got them as replicas=, and FSDP2 does not know them. Call "
    'set_spec("dense")'
)
_NO_STATE = "load_state_dict() got no state of gradcomp.fsdp: it has no {key!r}; pass the result of state_dict(), loaded"


def attach(
    model: torch.nn.Module,
    spec: str | Compressor = "blocks",
    *,
    weights: str | Compressor | None = None,
    replicas: DeviceMesh | dist.ProcessGroup | None = None,
    seed: int = 0,
) -> Handle:
    """Compress the exchange of a model's gradients, from the next backward pass on. All ranks call it.

    Over shards, only specs that round every entry act, such as blocks. Over replicas all do: one that keeps a residual, such as
    topk, exchanges updates after the optimizer's step, and leaves the reduce-scatter over shards to torch. All replicas
    start from the first one's parameters and buffers.

    Args:
        model: The model, after fully_shard() or replicate(), and before training.
        spec: "name:knob=value", or a compressor.
        weights: "blocks:bits=8" rounds the weights that shards gather, for forward and backward passes alone: shards,
            optimizer and checkpoint stay exact. Norms, biases and small parameters are not rounded. None: torch's own gathers.
        replicas: The ranks with the same shards as this one, where fully_shard() got the dimension of shards alone. Not
            needed for a mesh of both dimensions.
        seed: The seed of random draws, equal on all ranks.

    Returns:
        The handle of the exchange: stats(), residual(), set_spec(), remove(), state_dict() and load_state_dict().

    Raises:
        TypeError: FSDP2 has not sharded or replicated the model.
        RuntimeError: attach() has been called on this model already.
        ValueError: The spec or the model does not fit the mesh, or the ranks do not agree.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
        >>> for layer in model.layers:
        ...     fully_shard(layer, mesh=mesh["shard"])
        >>> fully_shard(model, mesh=mesh["shard"])
        >>> handle = gradcomp.fsdp.attach(model, "topk", replicas=mesh["replicate"])
    """
    bits = None if weights is None else bits_of(make(weights) if isinstance(weights, str) else weights)
    modules = modules_of(model, _Reduction)
    mesh = groups_of(modules, group_of(replicas))
    device = modules[0].device
    slots = [ModuleSlot(name, find, of.device) for of in modules for name, find in of.that_train()]
    frozen = {name: find for of in modules for name, find in of.that_train(False)}
    shards = None if mesh.shards is None else TorchNetwork(mesh.shards, device)
    gathered = None if bits is None or shards is None else GatheredWeights(bits, shards)
    replicated = None if mesh.replicas is None else TorchNetwork(mesh.replicas, device)
    network = replicated or shards or TorchNetwork(mesh.any, device)
    if mesh.replicas is not None and (offloaded := slots[0].layer.device) != network.device:
        network = TorchNetwork(mesh.replicas, offloaded)
    handle = _Handle(
        spec,
        ModuleSlots(slots, frozen, shards, str(gathered or "whole")),
        network,
        Options(seed=seed),
        ModuleDoor(
            has_optimizers=True,
            exchanges_gradients=True,
            agreed={} if shards is None or mesh.replicas is None else {"shard": str(shards.world.rank)},
            has_replicas=mesh.replicas is not None,
            has_shards=shards is not None,
        ),
    )
    session = handle._session
    if mesh.replicas is not None and shards is not None:
        session.membership.axes.append(Membership(shards))
    if bits is not None and shards is None:
        warn_user(_ONE_SHARD)
    handle.modules = Modules(session, shards, replicated, gathered)
    session.meet()
    if mesh.replicas is not None:
        _share_first(model, mesh.replicas)
    _tell(model, modules, handle.modules)
    lacks_memory = mesh.replicas is not None and any(local(each).is_meta for each in model.parameters())
    beginning = model.register_forward_pre_hook(_Beginning(mesh.replicas if lacks_memory else None), prepend=True)
    undo = [beginning.remove, *(restoring(module.group) for module in modules)]
    handle.undo = undo if replicas is None or mesh.replicas is None else None
    for module in modules:
        reduction: Any = _Reduction(handle.modules, module, mesh)
        set_reduce_scatter(module.fsdp_module, reduction)
        if gathered is not None:
            gathering: Any = _Gathering(gathered, module, mesh.shards)
            set_all_gather(module.fsdp_module, gathering)
        if mesh.replicas is not None:
            hide_replicas(module.group)
            module.fsdp_module.set_all_reduce_hook(reduction.over_replicas)
    return handle


class _Beginning:
    """What comes before every forward pass. replicas: to be given equal weights, which had no memory yet in attach()."""

    def __init__(self, replicas: dist.ProcessGroup | None):
        self._replicas = replicas

    def __call__(self, model: torch.nn.Module, inputs: Any) -> None:
        """Undo steps that have failed. Give all replicas the first one's weights, once."""
        give_up_failed()
        if self._replicas is not None:
            _share_first(model, self._replicas)
            self._replicas = None


def _tell(model: torch.nn.Module, modules: Sequence[Module], exchange: Modules) -> None:
    """Say on the first rank what is exchanged, and what is not."""
    session = exchange.session
    if session.network.world.rank or not session.slots.are_first:
        return
    log_on_rank_0(f"gradcomp: {session.spec} over FSDP2 exchanges {exchange.exchanges}", session.network)
    own = {id(find()) for of in modules for _, find in of.named}
    if unwrapped := [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in own]:
        warn_user(_UNWRAPPED.format(names=", ".join(map(repr, unwrapped[:3])) + (" and others" if len(unwrapped) > 3 else "")))
    if exchange.delays_gradients:
        warn_user(_LATE.format(spec=session.spec))


def _share_first(model: torch.nn.Module, replicas: dist.ProcessGroup) -> None:
    """Give all replicas the first one's parameters and buffers."""
    share_first((local(each.detach()) for each in (*model.parameters(), *model.buffers())), replicas)


class _Handle(Handle):
    """The handle of an exchange over FSDP2. Its state is for torch.distributed.checkpoint. modules: exchange gradients.
    undo: what attach() did; None where torch does not know the replicas.
    """

    modules: Modules
    undo: Sequence[Callable[[], None]] | None

    def remove(self) -> None:
        if self.undo is None:
            raise ValueError(_UNKNOWN_TO_TORCH)
        super().remove()

    def _give_back(self) -> None:
        for each in self.undo or ():
            each()

    def stats(self) -> Stats:
        stats: Stats = {**super().stats(), "exchanges": self.modules.exchanges, "traffic_ratio": None}
        if self.modules.weights is not None:
            stats["weight_bytes_sent"] = self.modules.weights.sent_in_step
        return stats if self.modules.shards is None else {**stats, "grad_norm": None}  # which is of this rank's shards

    def _watch(self, writers: Sequence[Writer], intervals: Intervals) -> None:
        if not self._session.reducer.on_updates:
            raise ValueError(_NOTHING_TO_WATCH.format(spec=self._session.spec))
        super()._watch(writers, intervals)

    def _choose(self, auto: Auto | None) -> None:
        if auto is not None:
            raise ValueError(_NOT_YET)
        super()._choose(auto)

    def state_dict(self) -> dict[str, Any]:
        """Copy what stays from step to step: DTensors on the parameters' mesh. All ranks call it.

        Residuals of replicas, and the steps that their entries have waited, are saved as their means, so that any number of
        shards and replicas can load them. A checkpoint keeps one replica's optimizer state, so these become their means, in the
        optimizers too: call this before that state is copied. A compressor's own state, such as a threshold, is not saved, nor
        what Adam's updates are multiplied by, which the ranks find anew within 36 steps.

        Returns:
            The state, for torch.distributed.checkpoint.save() or load().

        Raises:
            RuntimeError: The call came in the middle of a step.

        Example:
            >>> dcp.save({"model": model.state_dict(), "gradcomp": handle.state_dict()}, checkpoint_id=folder)
        """
        session = self._session
        give_up_failed()
        session.phases.note("state_dict()")
        parameters, state = session.slots.parameters, {"spec": session.spec, "steps": session.reducer.steps_done}
        if not session.reducer.on_updates:
            return state
        run(average_kept(session.updates.optimizers, session.network))
        residuals = _means(session, "residual", session.resume.residual())
        ages = {name: each.round().byte() for name, each in _means(session, "age", session.resume.ages()).items()}
        parts = {"residual": residuals, "ages": ages}
        return {**state, **{of: {n: _like(parameters[n], each) for n, each in part.items()} for of, part in parts.items()}}

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
        resume = self._session.resume
        with resume.refusing_together() as facts, reading():
            residuals, ages, steps = self._checked(state)
            facts.append(f"step {steps}")
        resume.load_residuals(residuals, ages, steps)

    def _checked(self, state: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        """Return the residuals and ages of this rank's shards in a state, and its steps. Refuse one that does not fit."""
        session = self._session
        for key in ("spec", "steps"):
            if not isinstance(state, Mapping) or key not in state:
                raise ValueError(_NO_STATE.format(key=key))
        if (theirs := state["spec"]) != session.spec:
            theirs = theirs if isinstance(theirs, str) else type(theirs).__name__
            raise ValueError(_OTHER_SPEC.format(theirs=theirs, spec=session.spec))
        names = session.slots.parameters.keys() if session.reducer.on_updates else ()
        tables = [read_table(state, of) if of in state else {} for of in ("residual", "ages")]
        forms = ((names, torch.float32), (names if tables[1] else (), torch.uint8))
        for table, (known, form) in zip(tables, forms, strict=True):
            for name in known ^ table.keys():
                # An older version left out what has no entry.
                if name in table or local(session.slots.parameters[name]).numel():
                    raise ValueError(_OTHER_LAYERS.format(name=name, where="model" if name in known else "state"))
            for name, part in table.items():
                own = session.slots.parameters[name]
                fits = hasattr(part, "to_local") and part.shape == own.shape and local(part).shape == local(own).shape
                if not fits or local(part).dtype != form or not bool(local(part).isfinite().all()):
                    raise ValueError(_DAMAGED.format(name=name))
        residuals, ages = ({name: local(part) for name, part in table.items()} for table in tables)
        return residuals, ages, read_int(state, "steps")


def _means(session: Session, what: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the means over replicas, by name, in the shards' shapes. All ranks call it."""
    size = session.network.world.size
    answers = {
        name: session.network.start(Reduce(each.reshape(-1) / size), f"the mean {what} of {name!r}")
        for name, each in own.items()
        if each.numel()
    }
    means: dict[str, Any] = {name: answer() for name, answer in answers.items()}
    return {name: means[name].view(each.shape) if name in means else each for name, each in own.items()}


def _like(parameter: Any, local: Tensor) -> DTensor:
    """Make a DTensor of a local part, on the mesh of a parameter."""
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


class _Reduction:
    """The reductions of one module's gradients: torch's interface of a custom reduce-scatter, and the all-reduce after it."""

    def __init__(self, modules: Modules, module: Module, mesh: Mesh):
        self._modules, self._number, self._mesh, self._group = modules, module.number, mesh, module.group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a tensor."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce the module's gradients over shards, each rank's part to that rank."""
        modules, number, shards = self._modules, self._number, self._modules.shards

        def reduce() -> tuple[int, int]:
            if (axis := modules.axis(shards)) is not None:
                return axis.scatter(number, input_tensor, output_tensor, _scale(op, group.size()), modules.step)
            reduce_scatter(output_tensor, input_tensor, op, group)
            sent = (input_tensor.numel() - output_tensor.numel()) * input_tensor.itemsize
            return (sent, 0) if shards is None else bytes_of_native(sent, shards.world)

        modules.run(reduce)

    def over_replicas(self, tensor: Tensor) -> None:
        """Reduce the module's gradients over replicas, in torch's hook after the shards' reduction.

        A factor of the user's divides the sum over all ranks.
        """
        modules, replicas = self._modules, self._modules.replicas
        assert replicas is not None
        is_mean = self._group.gradient_divide_factor is None
        scale = 1.0 if is_mean else float(replicas.world.size)

        def reduce() -> tuple[int, int]:
            if modules.spec_acts_on_updates:  # after the optimizer's step
                if scale != 1:
                    tensor.mul_(scale)
                return 0, 0
            if (axis := modules.axis(replicas)) is not None:
                return axis.reduce(self._number, tensor, scale, modules.step)
            dist.all_reduce(tensor, dist.ReduceOp.AVG if is_mean else dist.ReduceOp.SUM, self._mesh.replicas)
            return bytes_of_native(tensor.numel() * tensor.itemsize, replicas.world)

        modules.run(reduce)


class _Gathering:
    """torch's interface of a custom all-gather, of one module's weights."""

    def __init__(self, weights: GatheredWeights, module: Module, shards: dist.ProcessGroup | None):
        self._weights, self._module, self._shards = weights, module, shards
        self._division = Division.of(module.shards)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a tensor."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather the module's weights. What a smaller group gathers, after a forward pass, has been rounded before."""
        division = self._division
        if group is self._shards and division.rounded:
            if input_tensor.dtype in TYPES and input_tensor.numel() == sum(division.sizes):
                self._weights.gather(self._module.number, input_tensor, output_tensor, division)
                return None
            self._division = Division(division.sizes, [False] * len(division.sizes))
            warn_user(_WHOLE.format(name=self._module.name, kind=str(input_tensor.dtype).removeprefix("torch.")))
        self._weights.sent += input_tensor.nbytes * (group.size() - 1)
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


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
