"""Buckets of gradients, or of updates, and the loop that drives their compressors.

ready() notes one gradient. A bucket starts its exchange as soon as its last gradient is ready. finish() advances all buckets to
their updates, round by round, in bucket order. It never runs one to its end while others wait: ranks may start their buckets in
different orders, and would then block each other.
"""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.autograd import profiler

from gradcomp.core.compressor import Compressor
from gradcomp.core.requests import Gather, Reduce, Reply, Send, bytes_of
from gradcomp.engine.bucket import GRADIENT_TYPES, Bucket, check_type
from gradcomp.engine.clock import StepClock
from gradcomp.engine.context import StepContext, Traffic
from gradcomp.engine.plan import plan
from gradcomp.engine.slots import Slot
from gradcomp.engine.updates.agreement import Agreement
from gradcomp.engine.updates.hidden_momentum import Momentum
from gradcomp.native import kernels
from gradcomp.native.memory import Memory, Update
from gradcomp.networks import Network

# The size of buckets where the user leaves it open, in 10^6 bytes. Updates then travel in so many buckets, or fewer.
BUCKET_MB, BUCKETS_OF_UPDATES = 25, 4
# Seeds stay below this, so that kernels can add a bucket's number to one.
LARGEST_SEED = 2**62

# Delivers scale times a bucket's update to the arrays of its layers.
Deliver = Callable[[Bucket, Sequence[Tensor], Update, float], None]


def write(_: Bucket, arrays: Sequence[Tensor], update: Update, scale: float) -> None:
    """Write an update into the arrays, scale times."""
    update.is_wiped = kernels.spread(update.flat, arrays, scale, update.marks, update.copied)


@dataclass(frozen=True)
class Options:
    """The options that a door passes on from its user.

    bucket_mb: the largest size of a bucket of several layers, in 10^6 bytes; None: see BUCKET_MB. seed: the seed of random
    draws; later buckets add their index. memory: the lender of scratch and updates, a new one by default. deliver: what becomes
    of means. names: of all layers that rules for layers are for, where they are more than are exchanged here.
    """

    bucket_mb: float | None = None
    seed: int = 0
    memory: Memory | None = None
    deliver: Deliver = write
    names: Sequence[str] = ()

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

    exchanges: what the ranks exchange, in words. grad_norm: of this rank's own gradients, in the last backward pass of an
    exchange of updates; None before it, and for other exchanges. health: of each bucket's residual, at the last measurement.
    steps: done; of several optimizers, each one's exchange counts. overlap: exchanges overlap with backward. bytes_dense: of
    what the step exchanged, as float32. bytes_sent: handed to the network; bytes_between_hosts: as much of it as goes to other
    hosts. payload_ratio, or compression: bytes_dense / bytes_sent; None before the first step. traffic_ratio: the bytes that a
    ring of the same gradients in float32 sends through a host's interface, over those of this exchange; None over FSDP2.
    weight_bytes_sent: by FSDP2's gathers, with weights=, to all other ranks. auto: the choice, and its reason.
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
    payload_ratio: float | None
    traffic_ratio: float | None
    weight_bytes_sent: int
    auto: dict[str, Any]


_NO_RANGE = nullcontext()


def _range(part: str, bucket: Bucket) -> Any:
    """Make a range, of a part of a bucket's step, in a profiler's trace."""
    return profiler.record_function(f"gradcomp::{part} (bucket {bucket.index})")


class Reducer:
    """All buckets of one model on one rank.

    slots: by the layers' names. parts: by layer; the buckets of a part are exchanged together, and fail together. None: one
    part. on_updates: buckets exchange the progress of their weights. entries: of the whole model. observer, clock: telemetry's,
    and the seconds that it reads; None for none. traffic: of the last step; sending: of the one under way.
    """

    def __init__(
        self,
        compressor: Compressor,
        slots: Mapping[str, Slot],
        network: Network,
        options: Options,
        parts: Mapping[str, Hashable] | None = None,
        on_updates: bool = False,
    ):
        self.network, self.slots, self.parts, self.on_updates = network, slots, parts, on_updates
        layers = {name: slot.layer for name, slot in slots.items()}
        self.entries = sum(layer.size for layer in layers.values())
        self.observer: Any = None
        self.clock: StepClock | None = None
        self.context = StepContext(options.memory or Memory(), compressor.traits.rates != "unused")
        seed, bucket_mb = int(options.seed), options.bucket_mb
        if bucket_mb is None:
            bucket_mb = float(BUCKET_MB)
            if on_updates:  # a bucket ends before the layer that it has no room for
                largest = max((layer.size for layer in layers.values()), default=0)
                bucket_mb = max(bucket_mb, 4e-6 * (self.entries / BUCKETS_OF_UPDATES + largest))
        planned = plan(layers, bucket_mb, compressor, parts, wraps_all=on_updates, names=options.names)
        self.buckets = [
            Bucket(i, *each, seed + i, [slots[name] for name in each.layout.names] if on_updates else None)
            for i, each in enumerate(planned)
        ]
        self._deliver, self._takes_back = options.deliver, not on_updates and self.keeps_residual
        self._bucket_of = dict.fromkeys(slots) | {name: bucket for bucket in self.buckets for name in bucket.layout.names}
        self.steps_done = 0
        self.traffic, self.sending = Traffic(), Traffic()
        self._agreement: Agreement | None = None  # of the step under way, not ended yet

    def watch(self, observer: Any) -> None:
        """Tell an observer of all steps; None for no longer."""
        self.observer, self.clock = observer, None if observer is None else self.clock or StepClock()

    @property
    def given_momentum(self) -> Momentum | None:
        """The momentum that the spec sets in place of the optimizers'."""
        found = [each.feedback.given_momentum for each in self.buckets if each.feedback is not None]
        return next((each for each in found if each is not None), None)

    @property
    def keeps_residual(self) -> bool:
        """True if any bucket keeps one."""
        return any(bucket.progress is not None for bucket in self.buckets)

    @property
    def part_numbers(self) -> list[int]:
        """The part of each bucket, as a number."""
        parts = self.parts or {}
        of = [parts.get(bucket.layout.names[0]) for bucket in self.buckets]
        numbers = {part: i for i, part in enumerate(dict.fromkeys(of))}
        return [numbers[part] for part in of]

    @property
    def part_of_layer(self) -> dict[str, int]:
        """The part of each layer, as a number."""
        return {name: part for each, part in zip(self.buckets, self.part_numbers, strict=True) for name in each.layout.names}

    @property
    def exchanges(self) -> str:
        """Describe what the ranks exchange."""
        return "updates" if self.on_updates else "gradients"

    def ready(self, slot: Slot, grad: Tensor) -> None:
        """Note a layer's gradient. See ready_all()."""
        self.ready_all((slot,), (grad,))

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
                if self.clock is not None:
                    self.clock.note_gradient()
            elif name in known:
                raise RuntimeError(
                    f"the gradient of {name!r} came twice in one step; finish the step before the next backward pass"
                )
            known[name] = grad
            if bucket.streams.has_streams:
                bucket.streams.note()
            if len(known) == bucket.count:
                if self.clock is not None:
                    self.clock.note_full_bucket(len(self.buckets))
                self._start(bucket)

    def start_all(self, scale: float = 1.0) -> None:
        """Start every bucket that has not started. A layer without a gradient gets one of zeros.

        scale: the gradients are then scale times the mean update.
        """
        self.context.scale = scale
        if self.clock is not None:
            self.clock.note_last_gradient()
        for bucket in self.buckets:
            if not bucket.has_started:
                self._start(bucket)

    def advance(self, buckets: Sequence[Bucket] | None = None) -> bool:
        """Advance all running buckets, or these, by one round: wait for their replies, and start their next requests.

        Return False once every update is delivered.
        """
        goes_on = False
        for bucket in self.buckets if buckets is None else buckets:
            if bucket.answer is None:
                continue
            if bucket.streams.has_streams:
                bucket.streams.join()
            asked = time.perf_counter()
            with _range("exchange", bucket) if profiler._is_profiler_enabled else _NO_RANGE:
                reply = bucket.answer()
            replied = asked if self.clock is None else self.clock.note_reply(asked)
            with _range("add", bucket) if profiler._is_profiler_enabled else _NO_RANGE:
                self._resume(bucket, reply)
            if self.clock is not None:
                self.clock.note_encoded(replied)
            goes_on |= bucket.answer is not None
        return goes_on

    def finish(self, scale: float = 1.0) -> None:
        """Finish all exchanges of the step. The gradients are then scale times the mean update."""
        self.context.scale = scale
        for bucket in self.buckets:
            if not bucket.has_started:
                self.start_all(scale)
                break
        while self.advance():
            pass
        self.end_step()
        if self.observer is not None:
            self.conclude()

    def conclude(self) -> None:
        """Wait for the replies that the observer has asked for, outside the step's time."""
        if self.observer is not None:
            self.observer.conclude()
        if self.clock is not None:
            self.clock.restart()

    def run(self, buckets: Sequence[Bucket], scale: float = 1.0, agreement: Agreement | None = None) -> None:
        """Exchange the progress of the weights of these buckets. They move by scale times the mean.

        agreement: of the ranks, under way; it ends before the first request, after work that is this rank's own.
        """
        self.context.scale, self._agreement = scale, agreement
        if self.clock is not None:
            self.clock.note_gradient()
            self.clock.note_last_gradient()
        for bucket in buckets:
            self._start(bucket)
        while self.advance(buckets):
            pass
        self.end_step()
        if self.observer is not None:
            self.conclude()

    def end_step(self) -> None:
        """End the step after all its updates are delivered: take them back if it failed, and count it."""
        delivered = time.perf_counter()
        if self._takes_back:
            self._take_back()
        for bucket in self.buckets:
            if bucket.has_started or bucket.grads:
                bucket.forget_grads()
        self.context.has_begun = False
        self.steps_done += 1
        self.traffic, self.sending = self.sending, Traffic()
        if self.clock is not None:
            self.clock.note_encoded(delivered)
            self.clock.note_end()
        if self.observer is not None:
            self.observer.step_done(self)

    def note_stock_step(self, sent: int) -> None:
        """Count a step that the stock framework has exchanged, with so many bytes."""
        self.steps_done += 1
        self.traffic = Traffic(sent, sent, reduced=sent)
        if self.clock is not None:
            self.clock.note_last_gradient()
            self.clock.note_end()

    def abort(self) -> None:
        """Discard the running step after a failure of the network."""
        self.sending = Traffic()
        for bucket in self.buckets:
            if bucket.running is not None:
                bucket.running.close()
            bucket.running = bucket.answer = None
            bucket.forget_grads()
        self.context.has_begun, self._agreement = False, None
        if self.observer is not None:
            self.clock = StepClock()
            self.observer.discard()

    def _start(self, bucket: Bucket) -> None:
        began = time.perf_counter()
        bucket.has_started = True
        self.sending.dense += 4 * sum(bucket.layout.sizes)
        if bucket.streams.has_streams or (len(bucket.grads) < bucket.count and not bucket.of_weights):
            bucket.complete()
        context = self.context
        if not context.has_begun:
            context.has_begun, context.world = True, self.network.world
            every = self.slots.values()
            context.frozen_layers = frozenset(
                [each.name for each in every if each.parameter is not None and not each.parameter.requires_grad]
            )
        with _range("accumulate", bucket) if profiler._is_profiler_enabled else _NO_RANGE:
            acc = bucket.collect(context)
        with _range("select", bucket) if profiler._is_profiler_enabled else _NO_RANGE:
            bucket.round, bucket.running = 0, bucket.exchange(acc, context.world)
            self._resume(bucket, None)
        if self.clock is not None:
            self.clock.note_encoded(began)

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
            with _range("deliver", bucket) if profiler._is_profiler_enabled else _NO_RANGE:
                if bucket.of_weights and bucket.progress is not None:
                    bucket.progress.deliver(end.value, self.context.scale)
                else:
                    if bucket.progress is not None:
                        bucket.progress.return_rest()
                    self._deliver(bucket, self._arrays(bucket), end.value, self.context.scale)
            if end.value.source is not None:
                self.context.memory.give_back(end.value)
        else:
            sent = request.payload.bytes.numel() if isinstance(request, Gather) else bytes_of(request)
            self.sending.sent += sent
            self.sending.gathered += sent if isinstance(request, Gather) else 0
            is_send = isinstance(request, Send)  # which alone names its receivers
            self.sending.between_hosts += bytes_of(request, self.context.world.on_other_host) if is_send else sent
            self.sending.reduced += sent if isinstance(request, Reduce) else 0
            if self.clock is not None:
                self.clock.note_request()
            if self._agreement is not None:
                agreement, self._agreement = self._agreement, None
                agreement.end()
            bucket.answer = self.network.start(request, f"bucket {bucket.index}, request {bucket.round}")
            bucket.round += 1

    def _arrays(self, bucket: Bucket) -> Sequence[Tensor]:
        """Return the arrays that a bucket's mean is written into. All of its slots have one of their own, or none has."""
        if self.slots[bucket.layout.names[0]].update is None:
            return bucket.ordered_grads
        return [update for name in bucket.layout.names if (update := self.slots[name].update) is not None]

    def _take_back(self) -> None:
        """Return what was delivered to the residuals, in every bucket, if an entry of it is not finite: nobody takes that step.

        A bucket whose own exchange failed has kept everything. Its first entry is NaN.
        """
        delivered = [self._arrays(bucket) for bucket in self.buckets]
        squares = [torch.zeros(bucket.count, dtype=torch.float64, device=bucket.layout.device) for bucket in self.buckets]
        for arrays, of_bucket in zip(delivered, squares, strict=True):
            kernels.sum_squares(arrays, of_bucket, self.context.memory)
        if all(bool(of_bucket.isfinite().all()) for of_bucket in squares):
            return
        for bucket, arrays in zip(self.buckets, delivered, strict=True):
            if bucket.progress is not None and not bool(arrays[0].view(-1)[0].isnan()):
                bucket.progress.take_back(arrays, self.context.scale)

    @property
    def bytes_dense(self) -> int:
        """The bytes of what the last step exchanged, as float32. Of several optimizers, each exchanges its own parameters.

        Of a rank's shards, the bytes of all shards.
        """
        own = sum(slot.layer.size for slot in self.slots.values())
        return round(self.traffic.dense * self.entries / own) if self.traffic.dense else 4 * self.entries

    def stats(self) -> Stats:
        """Return figures of the last step."""
        dense = self.bytes_dense
        ratio = dense / self.traffic.sent if self.traffic.sent else None
        through = self.traffic.on_interface(self.network.world) if self.traffic.sent else 0
        own = {name: figure for bucket in self.buckets for name, figure in bucket.compressor.stats(bucket.inner).items()}
        stats: Stats = {
            "exchanges": self.exchanges,
            "grad_norm": None,
            "health": [
                {"layers": list(each.layout.names), **each.health.figures}
                for each in self.buckets
                if each.health is not None and each.health.figures
            ],
            "steps": self.steps_done,
            "buckets": len(self.buckets),
            "overlap": not (self.on_updates or any(bucket.traits.whole_model for bucket in self.buckets)),
            "bytes_dense": dense,
            "bytes_sent": self.traffic.sent,
            "bytes_between_hosts": self.traffic.between_hosts,
            "compression": ratio,
            "payload_ratio": ratio,
            "traffic_ratio": Traffic(dense, dense, reduced=dense).on_interface(self.network.world) / through
            if through
            else None,
        }
        stats.update(own)  # type: ignore[typeddict-item]
        return stats
