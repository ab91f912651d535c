"""The exchange of a model whose modules reduce their gradients one by one, over shards, over replicas, or over both.

A module's gradients come as one flat tensor. Over shards, each rank gets the sums of its own part, rounded by the senders:
nothing stays. Over replicas, equal shards are exchanged as any bucket is, with a residual of this rank's shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Compressor, Layout
from gradcomp.core.requests import Reduce, Reply, Request, Requests, bytes_of
from gradcomp.engine.bucket import check_type
from gradcomp.engine.meeting import Flow, Membership
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options, Reducer
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Slot, Slots
from gradcomp.engine.stages.feedback import Feedback, with_feedback
from gradcomp.engine.state import residual_views
from gradcomp.engine.updates.steps import calling_scaler, listen, warn_user
from gradcomp.exchanges.rounded import Rounded
from gradcomp.native.memory import Memory
from gradcomp.networks import Connection

_WHOLE_MODEL = "{spec} needs all layers in one exchange, and here each module has its own; take {others}"
_RATES = "{spec} needs the optimizer's learning rates, which are unknown over FSDP2; take {others}"
_SCALED = (
    "a GradScaler steps the optimizer, and {spec} keeps a residual of scaled gradients: whenever the scale changes, its "
    "entries count too much or too little. Train in bfloat16 without a scaler, or take {others}, which keep nothing"
)
_NOT_OVER_SHARDS = (
    "{spec} cannot act over shards, and the mesh has no replicas: it keeps entries from step to step, which takes the memory "
    "of the whole model on each rank, or it has rules for layers. Take {others}"
)


# Seeds from one replica's to the next's: more than there are modules.
SEEDS = 2**20


class ModuleSlot(Slot):
    """The slot of a parameter's shard. module: the number of its module, and the device of gradients. whole: of all shards."""

    def __init__(self, name: str, shard: Tensor, parameter: torch.nn.Parameter, module: tuple[int, torch.device]):
        number, device = module
        super().__init__(name, shard.shape, device, parameter)
        self.parameter: torch.nn.Parameter = parameter
        self.module, self.whole = number, parameter.numel()

    def describe(self) -> str:
        """Describe the whole parameter: shards may differ."""
        return f"{self.name} {tuple(self.parameter.shape)} {self.layer.device.type}"


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh over which gradients are reduced.

    shards: the network of the ranks that have different shards; None: there is one shard. has_replicas: several ranks have
    equal shards.
    """

    shards: Connection | None
    has_replicas: bool


class ModuleSlots(Slots):
    """The slots of all modules' shards. suited: names specs that act over every axis, for messages."""

    slots: Sequence[ModuleSlot]

    def __init__(self, slots: Sequence[ModuleSlot], axes: Axes, suited: str):
        super().__init__(slots)
        self.axes, self.suited = axes, suited
        self.are_first = axes.shards is None or axes.shards.world.rank == 0
        self.whole = sum(slot.whole for slot in slots)

    def terms(self) -> dict[str, str]:
        return {"parameters": f"{self.whole} entries: " + ", ".join(slot.describe() for slot in self.slots)}


class Scatter:
    """The reduce-scatter of the modules' gradients over shards."""

    def __init__(self, compressor: Rounded, network: Connection, memory: Memory, seed: int):
        self.compressor, self._network, self._memory, self._seed = compressor, network, memory, seed
        self._states: dict[tuple[int, int], Any] = {}

    def run(self, module: int, given: Tensor, result: Tensor, scale: float, step: int) -> tuple[int, int]:
        """Reduce a module's gradients: result is scale times the mean of this rank's part.

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
        key = module, padded
        if key not in self._states:
            layout = Layout(("parts",), (flat.numel(),), flat.device)
            self._states[key] = self.compressor.init(layout, self._seed + module)
        state = self._states[key]
        state.steps = max(state.steps + 1, step)  # a module that was called twice reduces twice in a step
        requests = self.compressor.reduce_scatter(Acc(flat, self._memory), state, world)
        sums, sent, between_hosts = self._drive(requests, module)
        torch.mul(sums[:part], scale * world.mean_of_shares, out=result)
        return sent, between_hosts

    def _drive(self, requests: Requests[Tensor], module: int) -> tuple[Tensor, int, int]:
        reply: Reply | None = None
        sent = between_hosts = 0
        while True:
            try:
                request: Request = requests.send(reply)
            except StopIteration as end:
                return end.value, sent, between_hosts
            sent += bytes_of(request)
            between_hosts += bytes_of(request, self._network.world.on_other_host)
            reply = self._network.start(request, f"shards of module {module}")()


def _stateless(compressor: Compressor) -> Rounded | None:
    """Return the compressor that rounds, if that is all: nothing stays from step to step, and no gradient is clipped."""
    if isinstance(compressor, Feedback):
        keeps = compressor.feedback or compressor.set_momentum or compressor.clip or compressor.warmup
        compressor = compressor if keeps else compressor.inner
    return compressor if isinstance(compressor, Rounded) else None


class ModuleReducer(Reducer):
    """The buckets of all modules, if there are replicas, and the reduce-scatter over shards, if there are several.

    Each module's exchange runs to its end at once, and its updates fail apart from those of others. Where a GradScaler skips
    the optimizer's step, the other modules' gradients are lost, as without compression, and what came from their residuals.
    """

    def __init__(self, compressor: Compressor, slots: ModuleSlots, network: Connection, options: Options):
        if compressor.traits.whole_model:
            raise ValueError(_WHOLE_MODEL.format(spec=compressor, others=slots.suited))
        if compressor.traits.rates == "needed":
            raise ValueError(_RATES.format(spec=compressor, others=slots.suited))
        self._exchanges: Counter[int] = Counter()  # of each module, which number its verdicts
        self._modules = {slot.name: slot.module for slot in slots.slots}
        axes, self._whole = slots.axes, slots.whole
        self.is_native = compressor.traits.stock and not (isinstance(compressor, Feedback) and compressor.feedback)
        replicated = axes.has_replicas and not self.is_native
        by_name = {slot.name: slot for slot in slots.slots} if replicated else {}
        chosen = {name: with_feedback(compressor.choose(name, slot.layer)) for name, slot in by_name.items()}
        fed = {name: each for name, each in chosen.items() if isinstance(each, Feedback)}
        # The layers of each array that stays. They are the same on all ranks, also on those that have nothing of a layer.
        self._kept = [n for n in fed if fed[n].feedback or fed[n].set_momentum]
        super().__init__(compressor, by_name, network, options, self._modules)
        self._is_told = isinstance(compressor, Feedback) and not isinstance(compressor.momentum, str)
        self.scatter = self._scatter_of(compressor, axes, int(options.seed), slots.suited)

    def _scatter_of(self, compressor: Compressor, axes: Axes, seed: int, suited: str) -> Scatter | None:
        if axes.shards is None or self.is_native:
            return None
        if (rounded := _stateless(compressor)) is not None:
            # Replicas draw apart from one another, and from the buckets, which number their seeds from this one.
            replica = self.network.world.rank if axes.has_replicas else 0
            return Scatter(rounded, axes.shards, self.memory, seed + SEEDS * (1 + replica))
        if not axes.has_replicas:
            raise ValueError(_NOT_OVER_SHARDS.format(spec=compressor, others=suited))
        return None

    def _keeps_residual(self) -> bool:
        return bool(self._kept)

    def scatter_gradients(self, module: int, given: Tensor, result: Tensor, scale: float) -> None:
        """Exchange a module's gradients over shards. See Scatter.run()."""
        assert self.scatter is not None
        self.note_sent(*self.scatter.run(module, given, result, scale, self.steps_done + 1))

    def note_sent(self, sent: int, between_hosts: int) -> None:
        """Count bytes that no bucket has sent. between_hosts: of them to other hosts."""
        self._sent += sent
        self._sent_between_hosts += between_hosts

    def deliver(self, module: int, scale: float) -> None:
        """Run the exchange of a module's buckets to its end: the gradients become the updates."""
        self.scale = scale
        self._exchanges[module] += 1
        self._step, buckets = self._exchanges[module], self._groups.get(module, [])
        for bucket in buckets:
            if bucket.grads and not bucket.has_started:  # layers were frozen since attach()
                self._start(bucket)
        while self.advance(buckets):
            pass
        if buckets:
            self.deliveries[module].add_back(buckets, scale, self._step)
        for bucket in buckets:
            bucket.forget_grads()

    def start_all(self, scale: float = 1.0) -> None:
        """Start nothing: a module without gradients in a step exchanges nothing."""
        if self.clock is not None:
            self.clock.note_last_gradient()

    def _settle(self) -> None:
        """Settle nothing: each module's updates are settled already."""

    @property
    def delays_gradients(self) -> bool:
        """True if the optimizer sees gradients that are late, sparse or coarse, and the spec does not say so."""
        delayed = [bucket for bucket in self.buckets if bucket.keeps_residual or bucket.traits.coarse]
        if any(bucket.feedback is None or isinstance(bucket.feedback.momentum, str) for bucket in delayed):
            return True
        return self.scatter is not None and self.scatter.compressor.traits.coarse and not self._is_told

    def arrays(self) -> dict[str, dict[str, Tensor]]:
        """Return the arrays that stay from step to step, by name and layer, as views. All ranks have the same, in order."""
        if not self._kept:
            return {}
        views = residual_views(self)
        return {"residual": {n: views.get(n, torch.empty(0, device=self.layers[n].device)) for n in self._kept}}

    @property
    def exchanges(self) -> str:
        if self.is_native:
            return "gradients, whole, as without gradcomp"
        over = [*(["shards"] if self.scatter else []), *(["replicas"] if self.slots else [])]
        return f"gradients, over {' and '.join(over)}"

    @property
    def bytes_dense(self) -> int:
        return 4 * self._whole


class ModuleSession(Session):
    """A session of a model whose modules reduce their gradients one by one, within a backward pass."""

    slots: ModuleSlots
    reducer: ModuleReducer

    def __init__(self, compressor: Compressor, slots: ModuleSlots, network: Connection, options: Options, door: Door):
        self._passes: set[int] = set()  # the backward passes of the step: checkpoints have passes within a pass
        self._shards = None if slots.axes.shards is None else Membership(slots.axes.shards)
        super().__init__(compressor, slots, network, options, door)
        self._has_looked = False

    def _make_reducer(self, compressor: Compressor) -> ModuleReducer:
        reducer = ModuleReducer(compressor, self.slots, self.network, self.options)
        reducer.observer = self._observer
        return reducer

    def _install(self, reducer: Reducer, compressor: Compressor) -> None:
        super()._install(reducer, compressor)
        listen(self)  # though it exchanges gradients

    def before(self, optimizer: torch.optim.Optimizer, has_closure: bool = False) -> None:
        """Look for a GradScaler, once. Nothing else of the optimizer concerns the exchange."""
        if not self._has_looked and self.reducer.keeps_state and (scaler := calling_scaler()) is not None:
            self._has_looked = True
            if scaler.is_enabled():
                warn_user(_SCALED.format(spec=self.spec, others=self.slots.suited))

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the optimizer keeps its momentum."""

    def begin(self) -> None:
        """Begin a step with the first exchange of a backward pass. The end of the outermost pass ends it.

        A step that an error ended goes on in the next pass.
        """
        self._join_pass()
        super().begin()

    def _join_pass(self) -> None:
        """Wait for the end of the backward pass under way, and of what torch queues there: modules may exchange in it."""
        if (now := torch._C._current_graph_task_id()) not in self._passes:
            self._passes.add(now)
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._end_pass))

    def _end_pass(self) -> None:
        """End the step, unless the pass was within another one, which is joined before its next node runs."""
        node: Any = torch._C._current_autograd_node()
        follows = None if node is None else next((each for each, _ in node.next_functions if each is not None), None)
        if follows is None:
            self._passes.clear()
            self.finish()
            return

        def join(gradients: Any) -> None:
            handle.remove()
            self._join_pass()

        handle = follows.register_prehook(join)

    def scatter(self, module: int, given: Tensor, result: Tensor, scale: float) -> None:
        """Exchange a module's gradients over shards."""
        self._run(lambda: self.reducer.scatter_gradients(module, given, result, scale))

    def exchange(self, module: int, slots: Sequence[Slot], grads: Sequence[Tensor], scale: float) -> None:
        """Exchange a module's gradients over replicas. The gradients become scale times the mean update."""
        self.begin()
        self.ready_all(slots, grads)
        with self._noting_failure():
            self.reducer.deliver(module, scale)

    def run_native(self, operation: Callable[[], Any], sent: int, over: Connection) -> None:
        """Run a collective operation of the framework's own over a network, and count its bytes."""

        def run() -> None:
            operation()
            world = over.world
            far = sum(map(world.on_other_host, range(world.size)))
            self.reducer.note_sent(sent, sent * far // (world.size - 1))

        self._run(run)

    def _run(self, act: Callable[[], None]) -> None:
        self.begin()
        self.meet()
        with self._noting_failure():
            act()

    def fits(self, name: str, part: Any) -> bool:
        """Say whether a part of a saved array is that of a layer's shard."""
        return isinstance(part, Tensor) and part.shape == self._by_name[name].shape and bool(part.isfinite().all())

    def means(self) -> dict[str, dict[str, Tensor]]:
        """Return the means over replicas of the arrays that stay from step to step, by name and layer. All ranks call it."""
        world, means = self.network.world, {}
        for array, views in self.reducer.arrays().items():
            answers = {
                n: self.network.start(Reduce(view / world.size), f"the mean {array} of {n!r}") for n, view in views.items()
            }
            means[array] = {
                n: self._by_name[n].shaped(total) for n, each in answers.items() if isinstance(total := each(), Tensor)
            }
        return means

    def load_means(self, means: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Continue with arrays that means() returned. A compressor's own state begins anew."""
        reducer = self._make_reducer(self.compressor)
        for array, views in reducer.arrays().items():
            for name, view in views.items():
                if view.numel():
                    view.copy_(means[array][name].reshape(-1))
        reducer.steps_done = steps
        for bucket in reducer.buckets:
            bucket.steps = steps
        self.recover()
        self._install(reducer, self.compressor)

    def meeting(self, leader: int | None = None, follows: bool = True) -> Flow[None]:
        """Meet the ranks with equal shards, and then those with others. If any two of them differ, all raise an error."""
        error: ValueError | None = None
        try:
            yield from super().meeting(leader, follows)
        except ValueError as differ:  # the ranks with other shards wait
            error = differ
        try:
            if self._shards is not None:
                differ_in = str(error or "agree").rpartition("equal on all ranks: ")[2]  # as much as a record has room for
                replicas = {"replicas": differ_in}
                yield from self._shards.compare(self._terms() | replicas, 0, None)
                yield from self._shards.learn_hosts()
        except ValueError as differ:
            error = error or differ
        if error is not None:
            self._membership.part()
            raise error
