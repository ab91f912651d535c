"""The exchange of a model whose modules reduce their gradients one by one, over shards, over replicas, or over both.

A module's gradients come as one flat tensor. A spec that rounds, and keeps nothing, acts on it, over either axis. What keeps a
residual acts on updates, after the optimizer's step, between replicas with equal shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.by_layer import ByLayer
from gradcomp.core.compressor import Acc, Compressor, Layout
from gradcomp.core.requests import Reply, Request, Requests, World, bytes_of
from gradcomp.engine.bucket import check_type
from gradcomp.engine.feedback import Feedback
from gradcomp.engine.gathered_weights import GatheredWeights
from gradcomp.engine.phases import Door
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Slot, Slots, local
from gradcomp.exchanges.rounded import Rounded
from gradcomp.native import kernels
from gradcomp.native.memory import Memory, Update
from gradcomp.networks import Connection, Network

_RATES = "{spec} needs the optimizer's learning rates, which are unknown over FSDP2; take {others}"
_NOT_OVER_SHARDS = (
    "{spec} cannot act over shards, and the mesh has no replicas: it keeps entries from step to step, which takes the memory "
    "of the whole model on each rank, or it has rules for layers. Take {others}"
)
_CLIP = (
    "{spec} clips, and a rank under FSDP2 has the norm of its own shards alone: call torch.nn.utils.clip_grad_norm_() before "
    "step(), which knows them all, and leave clip= out"
)
# Specs that act over every axis.
SUITED = "blocks or half"


# Returns the parameter that a module has now.
Find = Callable[[], torch.nn.Parameter]


class ModuleSlot(Slot):
    """The slot of a parameter's shard. whole: the entries of all shards."""

    parameter: torch.nn.Parameter

    def __init__(self, name: str, find: Find, device: torch.device):
        """device: of a parameter that has no memory yet."""
        self._find, parameter = find, find()
        shard = local(parameter)
        super().__init__(name, shard.shape, device if shard.is_meta else shard.device, parameter)
        self.whole = parameter.numel()

    def renew(self) -> bool:
        """Take another parameter that the module has got: load_state_dict(assign=True) replaces it. Return whether it has."""
        before, self.parameter = self.parameter, self._find()
        return self.parameter is not before

    def flat(self, shaped: Tensor) -> Tensor:
        return local(shaped).reshape(-1)

    def describe(self) -> str:
        """Describe the whole parameter: shards may differ."""
        return f"{self.name} {tuple(self.parameter.shape)} {self.layer.device.type}"


class ModuleSlots(Slots):
    """The slots of all modules' shards. shards: the network of the ranks that have other shards; None: there is one shard."""

    slots: Sequence[ModuleSlot]

    def __init__(self, slots: Sequence[ModuleSlot], frozen: Mapping[str, Find], shards: Connection | None, weights: str = ""):
        """frozen: returns a parameter that needs no gradient at set-up, by its name. weights: the spec of their gathers."""
        super().__init__(slots, [(name, find()) for name, find in frozen.items()])
        self._frozen, self._weights = frozen, weights
        self.are_first = shards is None or shards.world.rank == 0
        self.entries = sum(slot.whole for slot in slots)

    def renew(self) -> bool:
        """Take other parameters that the modules have got. Return whether there are any."""
        before, self.without_gradient = self.without_gradient, [(name, find()) for name, find in self._frozen.items()]
        are_new = {one is not other for (_, one), (_, other) in zip(before, self.without_gradient, strict=True)}
        if True not in {slot.renew() for slot in self.slots} | are_new:
            return False
        self.parameters = {slot.name: slot.parameter for slot in self.slots}
        self.by_id = {id(slot.parameter): slot for slot in self.slots}
        return True

    def terms(self) -> dict[str, str]:
        described = ", ".join(slot.describe() for slot in self.slots)
        return {"parameters": f"{self.entries} entries: {described}", "weights": self._weights}


def rounded_of(compressor: Compressor) -> Rounded | None:
    """Return the compressor that rounds, if that is all: nothing stays from step to step, and no gradient is clipped."""
    if isinstance(compressor, Feedback):
        keeps = compressor.feedback or compressor.set_momentum or compressor.clip or compressor.warmup
        compressor = compressor if keeps else compressor.inner
    return compressor if isinstance(compressor, Rounded) else None


def is_native(compressor: Compressor) -> bool:
    """Say whether gradients travel whole, as without gradcomp."""
    return compressor.traits.stock and not isinstance(compressor, Feedback)


def _clips(compressor: Compressor) -> bool:
    """Say whether a compressor, or that of some layers, clips gradients."""
    of_layers = [*(each for _, each in compressor.rules), compressor.default] if isinstance(compressor, ByLayer) else []
    return any(isinstance(each, Feedback) and each.clip > 0 for each in (compressor, *of_layers))


@dataclass
class ModuleDoor(Door):
    """The door of modules that reduce their gradients one by one. has_replicas: several ranks have equal shards. has_shards:
    several have others."""

    has_replicas: bool = False
    has_shards: bool = False

    def acts_on_updates(self, compressor: Compressor) -> bool:
        """Decide whether the replicas exchange updates. Refuse what neither they nor the shards can exchange."""
        finely = is_native(compressor) or (rounded_of(compressor) is not None and not compressor.traits.acts_on_updates)
        if compressor.traits.rates == "needed":
            raise ValueError(_RATES.format(spec=compressor, others=SUITED))
        if self.has_shards and _clips(compressor):
            raise ValueError(_CLIP.format(spec=compressor))
        if not (self.has_replicas or is_native(compressor) or rounded_of(compressor)):
            raise ValueError(_NOT_OVER_SHARDS.format(spec=compressor, others=SUITED))
        return self.has_replicas and not finely


class Axis:
    """The exchange of the modules' gradients over one axis of the mesh, by a compressor that keeps nothing."""

    def __init__(self, compressor: Rounded, network: Network, seed: int):
        self.compressor, self._network, self._seed = compressor, network, seed
        self._memory = Memory()
        self._states: dict[tuple[int, int], Any] = {}

    def scatter(self, module: int, given: Tensor, result: Tensor, scale: float, step: int) -> tuple[int, int]:
        """Reduce a module's gradients to the ranks' parts: result is scale times the mean of this rank's part.

        Return the bytes sent, and the bytes sent to other hosts. given: one part for each rank. step: seeds the random
        rounding.
        """
        check_type(given, "the reduce_dtype")
        world, part = self._network.world, given.numel() // self._network.world.size
        padded = -(-part // self.compressor.group) * self.compressor.group
        flat = given
        if padded != part or given.dtype != torch.float32:  # not kept: it is as large as the whole module
            flat = torch.empty(world.size * padded, device=given.device)
            rows = flat.view(world.size, padded)
            rows[:, :part].copy_(given.view(world.size, part))
            rows[:, part:].zero_()
        state = self._state(module, flat, step)
        sums, sent, far = self._drive(self.compressor.reduce_scatter(Acc(flat, self._memory), state, world), module)
        torch.mul(sums[:part], scale * world.mean_of_shares, out=result)
        return sent, far

    def reduce(self, module: int, tensor: Tensor, scale: float, step: int) -> tuple[int, int]:
        """Make a module's gradients scale times their mean. Return the bytes sent, and those to other hosts. See scatter()."""
        check_type(tensor, "the reduce_dtype")
        flat = tensor.detach().reshape(-1).to(torch.float32, copy=True)
        state = self._state(module, flat, step)
        update, sent, far = self._drive(self.compressor.exchange(Acc(flat, self._memory), state, self._network.world), module)
        assert isinstance(update, Update)
        update.is_wiped = kernels.spread(update.flat, [tensor.view(-1)], scale, update.marks, update.copied)
        if update.source is not None:
            self._memory.give_back(update)
        return sent, far

    def _state(self, module: int, flat: Tensor, step: int) -> Any:
        key = module, flat.numel()
        if key not in self._states:
            layout = Layout(("gradients",), (flat.numel(),), flat.device)
            self._states[key] = self.compressor.init(layout, self._seed + module)
        state = self._states[key]
        state.steps = max(state.steps + 1, step)  # a module that was called twice reduces twice in a step
        return state

    def _drive(self, requests: Requests[Any], module: int) -> tuple[Any, int, int]:
        reply: Reply | None = None
        sent = between_hosts = 0
        while True:
            try:
                request: Request = requests.send(reply)
            except StopIteration as end:
                return end.value, sent, between_hosts
            sent += bytes_of(request)
            between_hosts += bytes_of(request, self._network.world.on_other_host)
            reply = self._network.start(request, f"gradients of module {module}")()


# Seeds from one axis' modules to the next's: more than there are modules.
SEEDS = 2**20


class Modules:
    """The exchanges of one model's modules within a backward pass.

    shards, replicas: the networks over which gradients travel; None: there is one shard, or one replica. weights: their
    gathers, of few bits; None: torch's own.
    """

    def __init__(
        self, session: Session, shards: Connection | None, replicas: Connection | None, weights: GatheredWeights | None = None
    ):
        self.session, self.shards, self.replicas, self.weights = session, shards, replicas, weights
        self._compressor: Compressor | None = None
        self._axes: dict[Connection, Axis] = {}
        self._passes: set[int] = set()  # the backward passes of the step: checkpoints have passes within a pass

    @property
    def spec_acts_on_updates(self) -> bool:
        """True if the replicas exchange updates after the optimizer's step."""
        return self.session.reducer.on_updates

    def axis(self, network: Connection | None) -> Axis | None:
        """Return the exchange of gradients over an axis; None where torch reduces them."""
        compressor = self.session.compressor
        if compressor is not self._compressor:
            self._compressor, self._axes = compressor, {}
            rounded, seed = rounded_of(compressor), int(self.session.options.seed)
            if rounded is not None and not is_native(compressor):
                # Replicas draw apart from one another, and from the buckets, which number their seeds from this one.
                replica = 0 if self.replicas is None else self.replicas.world.rank
                if self.shards is not None:
                    self._axes[self.shards] = Axis(rounded, self.shards, seed + SEEDS * (1 + replica))
                if self.replicas is not None and not self.spec_acts_on_updates:
                    self._axes[self.replicas] = Axis(rounded, self.replicas, seed)
        return None if network is None else self._axes.get(network)

    @property
    def delays_gradients(self) -> bool:
        """True if the optimizer sees gradients that are coarse, and the spec does not say so."""
        axis, spec = self.axis(self.shards), self.session.compressor
        is_told = isinstance(spec, Feedback) and not isinstance(spec.momentum, str)
        return axis is not None and axis.compressor.traits.coarse and not is_told

    @property
    def exchanges(self) -> str:
        """Describe what the ranks exchange."""
        over = [name for name, each in (("shards", self.shards), ("replicas", self.replicas)) if self.axis(each)]
        if self.spec_acts_on_updates:
            gradients = "updates, over replicas" + (", and gradients, over shards" if over else "")
        else:
            gradients = f"gradients, over {' and '.join(over)}" if over else "gradients, whole, as without gradcomp"
        return gradients if self.weights is None else f"{gradients}, and gathers weights as {self.weights}"

    def run(self, act: Callable[[], tuple[int, int]]) -> None:
        """Run a module's exchange. act: returns the bytes sent, and those to other hosts."""
        self._join_pass()
        self.session.gradients.begin()
        self.session.meet()
        sending = self.session.reducer.sending
        with self.session.noting_failure():
            sent, between_hosts = act()
        sending.sent += sent
        sending.between_hosts += between_hosts

    @property
    def step(self) -> int:
        """The number of the step under way."""
        return self.session.reducer.steps_done + 1

    def _join_pass(self) -> None:
        """Wait for the end of the backward pass under way, and of what torch queues there: modules may exchange in it."""
        if (now := torch._C._current_graph_task_id()) not in self._passes:
            if not self._passes:
                self.session.updates.optimizers.renew_parameters()
            self._passes.add(now)
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._end_pass))

    def _end_pass(self) -> None:
        """End the step's gradients, unless the pass was within another one, which is joined before its next node runs."""
        node: Any = torch._C._current_autograd_node()
        follows = None if node is None else next((each for each, _ in node.next_functions if each is not None), None)
        if follows is None:
            self._passes.clear()
            if self.weights is not None:
                self.weights.end_step()
            if self.spec_acts_on_updates:
                self._end_local()
            else:
                self.session.gradients.finish()
            return

        def join(gradients: Any) -> None:
            handle.remove()
            self._join_pass()

        handle = follows.register_prehook(join)

    @torch.no_grad()
    def _end_local(self) -> None:
        """End a pass whose gradients stay the replica's own. What is not finite in one replica is so in all."""
        slots = self.session.slots.slots
        grads = [local(each.grad) for slot in slots if (each := slot.parameter) is not None and each.grad is not None]
        grads = [each for each in grads if each.numel()]
        if grads:
            self.session.updates.gradients.add([each.reshape(-1) for each in grads])
        poison = self.session.updates.end_backward()
        if poison is not None and (poison.is_cuda or bool(poison != 0)):
            for grad in grads:
                one = grad.view(-1)[:1] if grad.is_cuda and grad.is_contiguous() else grad
                one.add_(poison.to(grad.device, non_blocking=True))
        self.session.updates.note_backward()


def bytes_of_native(sent: int, world: World) -> tuple[int, int]:
    """Return the bytes of an operation of the framework's own, and those of them to other hosts."""
    far = sum(map(world.on_other_host, range(world.size)))
    return sent, sent * far // max(world.size - 1, 1)
