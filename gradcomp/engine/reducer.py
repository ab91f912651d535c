"""Buckets of gradients, and the loop that drives their compressors.

ready() notes one gradient. A bucket starts its exchange as soon as its last gradient is ready. finish() advances all buckets to
their updates, round by round, in bucket order. It never runs one to its end while others wait: ranks may start their buckets in
different orders, and would then block each other.
"""

from __future__ import annotations

import functools
import numbers
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from gradcomp.core.compressor import Acc, Compressor
from gradcomp.core.requests import Reply, Send, World, bytes_of
from gradcomp.engine.bucket import GRADIENT_TYPES, Bucket, check_type
from gradcomp.engine.clock import StepClock
from gradcomp.engine.context import LayerRates, StepContext
from gradcomp.engine.delivery import Delivery
from gradcomp.engine.gradient_cut import GradientCut
from gradcomp.engine.gradient_norm import GradientNorm
from gradcomp.engine.optimizer_view import OptimizerView
from gradcomp.engine.plan import plan
from gradcomp.engine.slots import Slot
from gradcomp.engine.taken_momentum import Missed
from gradcomp.native.extension import LARGEST
from gradcomp.native.memory import Memory, Update
from gradcomp.networks import Network

# The reason why the momenta of several optimizers are missed by a compressor of the whole model.
ONE_BUCKET = Missed(
    "its only bucket has layers of several optimizers", "Write a spec that lets each bucket go by itself, such as topk"
)
# Seeds stay below this, so that kernels can add a bucket's number to one.
LARGEST_SEED = 2**62


@dataclass(frozen=True)
class Options:
    """The options that a door passes on from its user.

    optimizer: the source of learning rates, or a list of several; momentum is taken over. scaler: the GradScaler of the loss.
    bucket_mb: the largest size of a bucket of several layers, in 10^6 bytes. seed: the seed of random draws; later buckets add
    their index. memory: the lender of scratch and updates, a new one by default.
    """

    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    scaler: Any = None
    bucket_mb: float = 25
    seed: int = 0
    memory: Memory | None = None

    def __post_init__(self) -> None:
        seed: Any = self.seed
        if not isinstance(seed, numbers.Integral) or not abs(int(seed)) < LARGEST_SEED:
            raise ValueError(f"seed={seed!r} must be a whole number between -2**62 and 2**62")

    @property
    def terms(self) -> dict[str, str]:
        """Describe the options that must be equal on all ranks."""
        return {"seed": str(self.seed), "bucket_mb": str(self.bucket_mb)}


class Stats(TypedDict, total=False):
    """Figures of the last step on this rank. A compressor may add figures of its own.

    exchanges: what the ranks exchange, in words. grad_norm: of this rank's own gradients before their exchange, in the last
    step that measured it. health: of each bucket's residual, at the last measurement. steps: done. overlap: exchanges overlap
    with backward. bytes_dense: of the gradients as float32. bytes_sent: handed to the network; bytes_between_hosts: as much of
    it as goes to other hosts. compression: bytes_dense / bytes_sent; None before the first step. auto: the choice, and its
    reason.
    """

    exchanges: str
    grad_norm: float | None
    health: list[dict[str, Any]]
    steps: int
    buckets: int
    overlap: bool
    bytes_dense: int
    bytes_sent: int
    bytes_between_hosts: int
    compression: float | None
    auto: dict[str, Any]


Method = TypeVar("Method", bound=Callable[..., Any])


def ranged(part: str) -> Callable[[Method], Method]:
    """Decorate a method that does a part of a bucket's step: a profiler's trace then shows its range, under this name.

    torch.profiler and torch.autograd.profiler.emit_nvtx() set the flag. Without it, a record_function costs microseconds.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, bucket: Bucket, *arguments: Any) -> Any:
            if not profiler._is_profiler_enabled:
                return method(self, bucket, *arguments)
            with profiler.record_function(f"gradcomp::{part} (bucket {bucket.index})"):
                return method(self, bucket, *arguments)

        return call  # type: ignore[return-value]

    return decorate


class Reducer:
    """All buckets of one model on one rank.

    slots: by the layers' names. view: of the optimizer. observer: telemetry's, which looks at every step; None for none.
    """

    def __init__(
        self, compressor: Compressor, slots: Mapping[str, Slot], network: Network, options: Options, view: OptimizerView
    ):
        self.network, self.slots, self.view = network, slots, view
        self.layers = {name: slot.layer for name, slot in slots.items()}
        self.observer: Any = None
        need = compressor.traits.rates
        if need == "needed" and view.rates() is None:
            raise ValueError(f"{compressor} needs the learning rates: pass optimizer=")
        self._uses_rates, self._rates_noted = need != "unused", False
        self._rates: LayerRates | None = None  # of the last exchange
        self.memory = options.memory or Memory()
        self._norm, self._cut = GradientNorm(self.memory), GradientCut(view, network, self.memory)
        seed = int(options.seed)
        parts = self._parts(compressor)
        planned = plan(self.layers, options.bucket_mb, compressor, parts)
        self.buckets = [Bucket(i, *each, seed=seed + i) for i, each in enumerate(planned)]
        self._layouts = [bucket.layout for bucket in self.buckets]
        # The optimizer's momentum is one for all its parameters: it is taken over if every bucket applies it.
        self.takes_momentum = all(bucket.takes_momentum for bucket in self.buckets) and (
            parts is not None or len(view.parts) == 1
        )
        # A residual, or a momentum of the spec's, stays from step to step.
        self.keeps_state = self.keeps_residual or any(bucket.traits.momentum for bucket in self.buckets)
        # Equal gradients have equal updates in every exchange, but for the rounding of sums.
        self.repeats = not self.keeps_state and all(bucket.traits.exact for bucket in self.buckets)
        # An optimizer applies, or skips, the updates of its buckets as one: each has a delivery for them.
        self._part_of = [parts[bucket.layout.names[0]] if parts else 0 for bucket in self.buckets]
        self._groups = {
            n: [each for each, of in zip(self.buckets, self._part_of, strict=True) if of == n] for n in self._part_of
        }
        self.deliveries = {n: Delivery(buckets, slots) for n, buckets in self._groups.items()}
        self._bucket_of = dict.fromkeys(slots) | {name: bucket for bucket in self.buckets for name in bucket.layout.names}
        self.scale, self.steps_done, self._step = 1.0, 0, 1  # _step: the number in verdicts, which no other step has
        self.bytes_sent = self.bytes_between_hosts = self._sent = self._sent_between_hosts = 0
        self.clock = StepClock()
        self._context: StepContext | None = None  # of the step under way
        self.generation = view.generation

    def _parts(self, compressor: Compressor) -> Mapping[str, int] | None:
        """Number the parts of a model by layer. No bucket has layers of two, and their updates fail apart. None: one part.

        A momentum is one optimizer's. A compressor that needs all layers in one bucket leaves it to the optimizers.
        """
        divides = len(self.view.parts) > 1 and not compressor.traits.whole_model
        return {name: self.view.part_of(name) for name in self.slots} if divides else None

    @property
    def keeps_residual(self) -> bool:
        """True if unsent entries of any bucket stay from step to step."""
        return any(bucket.keeps_residual for bucket in self.buckets)

    @property
    def exchanges(self) -> str:
        """Describe what the ranks exchange."""
        if self.takes_momentum or (missed := self.missed) is None:
            return self.view.exchanges(self.takes_momentum)
        return f"gradients, since {missed.reason}"

    @property
    def misses_any(self) -> bool:
        """True if a momentum that is not taken over costs accuracy: with a residual, or coarse rounding."""
        costs = self.keeps_residual or any(bucket.traits.coarse for bucket in self.buckets)
        return costs and all(bucket.takes_momentum for bucket in self.buckets)

    @property
    def missed(self) -> Missed | None:
        """The reason why the optimizer's momentum is missed, if that costs accuracy."""
        if not self.misses_any:
            return None
        return self.view.missed if self.takes_momentum or self.view.has_no_momentum else ONE_BUCKET

    def ready(self, slot: Slot, grad: Tensor | None = None) -> None:
        """Note a layer's gradient, by default the slot's. See ready_all()."""
        self.ready_all((slot,), (slot.read() if grad is None else grad,))

    def ready_all(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> None:
        """Note layers' gradients, and start each bucket with its last one.

        grads: contiguous. They must not change before their updates are delivered.
        """
        for slot, grad in zip(slots, grads, strict=True):
            name = slot.name
            if grad.dtype not in GRADIENT_TYPES:
                check_type(grad, f"the gradient of {name!r}")
            bucket = self._bucket_of[name]
            if bucket is None:  # a layer without entries
                continue
            known = bucket.grads
            if not known:
                self.clock.note_gradient()
            elif name in known:
                raise RuntimeError(
                    f"the gradient of {name!r} came twice in one step; finish the step before the next backward pass"
                )
            known[name] = grad
            if bucket.streams.has_streams:
                bucket.streams.note()
            if len(known) == bucket.count:
                self.clock.note_full_bucket(len(self.buckets))
                # Where the user clips, the norm of all gradients comes first: no bucket has begun the step.
                if self._context is not None or not self.view.clips:
                    self._start(bucket)

    def note_unused(self, names: Iterable[str]) -> None:
        """Note layers that this rank has not used in this step. Gradients of zeros come for them."""
        for name in names:
            if (bucket := self._bucket_of[name]) is not None:
                bucket.unused.add(name)

    def start_all(self, scale: float = 1.0) -> None:
        """Start every bucket that has not started. A layer without a gradient gets one of zeros.

        scale: the gradients are then scale times the mean update.
        """
        self.scale = scale
        self.clock.note_last_gradient()
        for bucket in self.buckets:
            if not bucket.has_started:
                self._start(bucket)

    def advance(self, buckets: Sequence[Bucket] | None = None) -> bool:
        """Advance all running buckets, or these, by one round: wait for their replies, and start their next requests.

        Return False once every update is delivered.
        """
        running = [bucket for bucket in (self.buckets if buckets is None else buckets) if bucket.answer is not None]
        for bucket in running:
            if bucket.streams.has_streams:
                bucket.streams.join()
            asked, reply = time.perf_counter(), self._wait(bucket)
            replied = self.clock.note_reply(asked)
            self._add(bucket, reply)
            self.clock.note_encoded(replied)
        return bool(running)

    def finish(self, scale: float = 1.0) -> None:
        """Finish all exchanges of the step. The gradients are then scale times the mean update."""
        self.start_all(scale)
        while self.advance():
            pass
        self.end_step()
        self.conclude()

    def conclude(self) -> None:
        """Wait for the replies that the observer has asked for, outside the step's time."""
        if self.observer is not None:
            self.observer.conclude()
        self.clock.restart()

    def end_step(self) -> None:
        """End the step after all its updates are delivered: take them back if it failed, and count it."""
        delivered = time.perf_counter()
        self._settle()
        self._rates, self._rates_noted = None if self._context is None else self._context.layer_rates, False
        self._context = None
        if self._norm.measures:
            self._norm.end_step()
        self._step, self.steps_done = self._step + 1, self.steps_done + 1
        self.bytes_sent, self.bytes_between_hosts = self._sent, self._sent_between_hosts
        self._sent = self._sent_between_hosts = 0
        self.clock.note_encoded(delivered)
        self.clock.note_end()
        if self.observer is not None:
            self.observer.step_done(self)

    def _settle(self) -> None:
        """Settle the step's updates: take them back if the step failed."""
        for part, buckets in self._groups.items():
            delivery = self.deliveries[part]
            delivery.add_back(buckets, self.scale, self._step)
            if self.takes_momentum or self.keeps_state:
                self.view.note_delivered(buckets, delivery, self._step)
        for bucket in self.buckets:
            bucket.forget_grads()

    def has_failed(self) -> bool:
        """Decide whether the last step has failed. This waits for a device if there is one."""
        return any(each.has_failed(self._step - 1) for each in self.deliveries.values())

    def selects(self, slot: Slot) -> bool:
        """Say whether a layer gets an update only of its own entries. Otherwise zeros may be rounded to something."""
        bucket = self._bucket_of[slot.name]
        return bucket is not None and bucket.traits.selects

    def take_back(self, slot: Slot, update: Tensor) -> None:
        """Add a layer's update, which nobody is to apply, back to its residual, if that stays and the step has not failed."""
        bucket = self._bucket_of[slot.name]
        if bucket is None or not bucket.keeps_residual or self.has_failed():
            return
        loss_scale, residual = self.view.loss_scale_on(update.device), bucket.layout.views(bucket.residual)[slot.name]
        residual.add_(update / (self.scale if loss_scale is None else self.scale * loss_scale)).clamp_(-LARGEST, LARGEST)

    def note_stock_step(self, sent: int) -> None:
        """Count a step that the stock framework has exchanged, with so many bytes."""
        self.clock.note_last_gradient()
        self._step, self.steps_done = self._step + 1, self.steps_done + 1
        self.bytes_sent = self.bytes_between_hosts = sent
        self.clock.note_end()

    def note_rates(self) -> None:
        """Note the rates that the optimizer steps with: they were unknown in the last exchange, or may be set after it."""
        if self._rates_noted or not self._uses_rates or (rates := self.view.rates()) is None:
            return
        self._rates_noted, is_linear = True, self.view.is_linear
        for bucket in self.buckets if rates is not self._rates else ():
            bucket.note_rates(rates.of(bucket.layout.names), is_linear)

    def abort(self) -> None:
        """Discard the running step after a failure of the network."""
        self._sent = self._sent_between_hosts = 0
        for bucket in self.buckets:
            if bucket.running is not None:
                bucket.running.close()
            bucket.running = bucket.answer = None
            bucket.forget_grads()
        self._context = None
        self._step += 1  # its verdicts are not the next step's
        self.clock = StepClock()
        if self.observer is not None:
            self.observer.discard()

    def _start(self, bucket: Bucket) -> None:
        began = time.perf_counter()
        bucket.has_started = True
        bucket.complete()
        context = self._context or self._begin_step()
        self._select(bucket, self._accumulate(bucket, context), context.world)
        self.clock.note_encoded(began)

    def _begin_step(self) -> StepContext:
        """Begin a step with its first bucket. Return the context of all its buckets."""
        layouts, world = self._layouts, self.network.world
        context = self._context = self.view.context(layouts, self.memory, world, self._uses_rates, self.takes_momentum)
        self._begin_anew(context.generation)
        self._norm.begin_step((self.takes_momentum or self.keeps_state) and self.view.looks_for_clip)
        if self.view.clips:  # all gradients are there
            for each in self.buckets:
                each.complete()
            self._cut.cut(self.buckets, context)
        return context

    def _begin_anew(self, generation: tuple[int, int]) -> None:
        """Forget the moments where the optimizer or its state was replaced, and the residual where a state was loaded."""
        before, self.generation = self.generation, generation
        if generation != before:
            for bucket in self.buckets:
                bucket.forget(moments_only=generation[0] == before[0])

    @ranged("accumulate")
    def _accumulate(self, bucket: Bucket, context: StepContext) -> Acc:
        if self.observer is not None:
            self.observer.before(bucket)
        if self._norm.measures:
            bucket.squares = self._norm.add(bucket, context.loss_scale(bucket.layout.device))
        acc = bucket.collect(context)
        if self.observer is not None:
            self.observer.collected(bucket)
        return acc

    @ranged("select")
    def _select(self, bucket: Bucket, acc: Acc, world: World) -> None:
        bucket.round, bucket.running = 0, bucket.exchange(acc, world)
        self._resume(bucket, None)

    @ranged("exchange")
    def _wait(self, bucket: Bucket) -> Reply:
        assert bucket.answer is not None
        return bucket.answer()

    def _resume(self, bucket: Bucket, reply: Reply | None) -> None:
        assert bucket.running is not None
        try:
            request = bucket.running.send(reply)
        except StopIteration as end:
            bucket.running = bucket.answer = None
            if not isinstance(end.value, Update):
                raise TypeError(
                    f"{bucket.compressor} returned a {type(end.value).__name__}; an exchange returns an Update"
                ) from None
            if self.observer is not None:
                self.observer.delivered(bucket, end.value)
            self._deliver(bucket, end.value)
            self.memory.give_back(end.value)
        else:
            self._sent += (sent := bytes_of(request))
            is_send = isinstance(request, Send)  # which alone names its receivers
            self._sent_between_hosts += bytes_of(request, self.network.world.on_other_host) if is_send else sent
            self.clock.note_request()
            bucket.answer = self.network.start(request, f"bucket {bucket.index}, request {bucket.round}")
            bucket.round += 1

    _add = ranged("add")(_resume)

    @ranged("deliver")
    def _deliver(self, bucket: Bucket, update: Update) -> None:
        self.deliveries[self._part_of[bucket.index]].write(bucket, update, self.scale, self._step)

    @property
    def bytes_dense(self) -> int:
        """The bytes of all gradients as float32."""
        return 4 * sum(layer.size for layer in self.layers.values())

    def stats(self) -> Stats:
        """Return figures of the last step."""
        dense = self.bytes_dense
        own = {name: figure for bucket in self.buckets for name, figure in bucket.compressor.stats(bucket.inner).items()}
        stats: Stats = {
            "exchanges": self.exchanges,
            "grad_norm": self._norm.asked(),
            "health": [health for bucket in self.buckets if (health := bucket.health) is not None],
            "steps": self.steps_done,
            "buckets": len(self.buckets),
            "overlap": not (self.view.clips or any(bucket.traits.whole_model for bucket in self.buckets)),
            "bytes_dense": dense,
            "bytes_sent": self.bytes_sent,
            "bytes_between_hosts": self.bytes_between_hosts,
            "compression": dense / self.bytes_sent if self.bytes_sent else None,
        }
        stats.update(own)  # type: ignore[typeddict-item]
        return stats
