"""Buckets of gradients, and the only loop that drives a compressor.

mark_ready() notes one gradient. A bucket starts its exchange as soon as its last gradient is ready. finish_step() advances all
buckets to their updates, round by round, in bucket order. It never runs one to its end while others wait: ranks may start
their buckets in different orders, and would then block each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gradcomp.core.compressor import Compressor, Layer
from gradcomp.core.requests import Reply, bytes_of
from gradcomp.engine.bucket import GRADIENT_TYPES, Bucket, check_type
from gradcomp.engine.context import Rates, StepContext
from gradcomp.engine.delivery import Delivery, LossScale
from gradcomp.engine.optimizers.own_momentum import OwnMomentum
from gradcomp.engine.plan import plan
from gradcomp.engine.steps.options import check_seed
from gradcomp.engine.steps.step_clock import StepClock
from gradcomp.engine.steps.step_observer import StepObserver
from gradcomp.native.memory import Memory, Update
from gradcomp.networks import Network


class Reducer:
    """All buckets of one model on one rank.

    bucket_mb: the largest size of a bucket of several layers, in 10^6 bytes.
    seed: the seed of the first bucket; later buckets add their index.
    rates: a function from layers' names to learning rates. linear: decides whether weights move by multiples of updates.
    frozen: finds the numbers of those among some layers that are frozen.
    memory: the owner of scratch and updates, a new one by default. observer: looks at every step, if given.
    loss_scale: that of the gradients, if they are scaled. momentum: the optimizer's, if it is known.
    targets: finds the arrays that a bucket's update is written into; by default its gradients.
    delivery: another reducer's, to share. deliver: called with each finished bucket and its mean update, which is valid during
    the call; by default the delivery writes it.
    """

    def __init__(
        self,
        compressor: Compressor,
        layers: Mapping[str, Layer],
        network: Network,
        bucket_mb: float,
        seed: int,
        *,
        rates: Callable[[Sequence[str]], Rates] | None = None,
        linear: Callable[[], bool] = lambda: False,
        frozen: Callable[[Sequence[str]], Sequence[int]] = lambda names: (),
        loss_scale: LossScale | None = None,
        momentum: OwnMomentum | None = None,
        targets: Callable[[Bucket], Sequence[Tensor]] | None = None,
        delivery: Delivery | None = None,
        deliver: Callable[[Bucket, Update], None] | None = None,
        memory: Memory | None = None,
        observer: StepObserver | None = None,
    ):
        check_seed(seed)
        need = compressor.traits.rates
        if need == "needed" and (rates is None or rates(list(layers)) is None):
            raise ValueError(f"{compressor} needs the learning rates: pass optimizer=")
        self.network, self.layers = network, dict(layers)
        self.rates, self._linear, self._frozen = None if need == "unused" else rates, linear, frozen
        self.memory = Memory() if memory is None else memory
        self.buckets = [
            Bucket(i, *planned, seed=int(seed) + i) for i, planned in enumerate(plan(layers, bucket_mb, compressor))
        ]
        # The optimizer's momentum is one for all its parameters: it is taken over if every bucket applies it.
        self._momentum = momentum
        if momentum is not None and not all(bucket.takes_momentum for bucket in self.buckets):
            momentum.leave()
            self._momentum = None
        # Entries wait, or a momentum of the spec's stays, from step to step.
        self.remembers = self.keeps_residual or any(bucket.traits.momentum for bucket in self.buckets)
        self.delivery = delivery or Delivery(self.buckets, loss_scale, targets)
        self._takes_back = delivery is not None or deliver is None
        self._deliver = deliver  # None: nothing that holds this reducer, since such a cycle keeps all its arrays
        self._bucket_of = dict.fromkeys(layers) | {name: bucket for bucket in self.buckets for name in bucket.layout.names}
        self.scale, self.steps_done, self._step = 1.0, 0, 1  # _step: the number in verdicts, which no other step has
        self.bytes_sent = self.bytes_between_hosts = self._sent = self._sent_between_hosts = 0
        self.clock, self.observer = StepClock(), observer
        self._context: StepContext | None = None  # of the step under way

    @property
    def keeps_residual(self) -> bool:
        """True if entries of any bucket wait from step to step."""
        return any(bucket.keeps_residual for bucket in self.buckets)

    @property
    def takes_momentum(self) -> bool:  # the optimizer's
        return self._momentum is not None

    def mark_ready(self, name: str, grad: Tensor) -> None:
        """Note a layer's gradient, and start its bucket if it is the last one.

        grad: contiguous. It must not change before its update is delivered.
        """
        if grad.dtype not in GRADIENT_TYPES:
            check_type(grad, f"the gradient of {name!r}")
        bucket = self._bucket_of[name]
        if bucket is None:  # a layer without entries
            return
        if not bucket.grads:
            self.clock.note_gradient()
        elif name in bucket.grads:
            raise RuntimeError(
                f"the gradient of {name!r} came twice in one step; finish the step before the next backward pass"
            )
        bucket.grads[name] = grad
        bucket.streams.note()
        if len(bucket.grads) == len(bucket.layout.names):
            self.clock.note_full_bucket(len(self.buckets))
            self._start(bucket)

    def start_all(self) -> None:
        """Start every bucket that has not started. A layer without a gradient gets one of zeros."""
        for bucket in self.buckets:
            if bucket.running is None:
                self._start(bucket)

    def advance(self) -> bool:
        """Advance all running buckets by one round: wait for their replies, and start their next requests.

        Return False once every update is delivered.
        """
        running = [bucket for bucket in self.buckets if bucket.answer is not None]
        for bucket in running:
            assert bucket.answer is not None
            bucket.streams.join()
            asked, reply = time.perf_counter(), bucket.answer()
            replied = self.clock.note_reply(asked)
            self._resume(bucket, reply)
            self.clock.note_encoded(replied)
        return bool(running)

    def finish_step(self, scale: float = 1.0) -> None:
        """Finish all exchanges of the step. The gradients are then scale times the mean update."""
        self.scale = scale
        self.clock.note_last_gradient()
        self.start_all()
        while self.advance():
            pass
        self.end_step()
        if self.observer is not None:
            self.observer.conclude()
            self.clock.restart()

    def end_step(self) -> None:
        """End the step after all its updates are delivered: take them back if it failed, and count it."""
        delivered = time.perf_counter()
        if self._takes_back:
            self.delivery.add_back(self.buckets, self.scale, self._step)
        if self._momentum is not None and self.buckets:
            failed = partial(self.delivery.has_failed, self._step)
            self._momentum.note_delivered(self.buckets, self.delivery.loss_scale(self.buckets[0]), failed)
        for bucket in self.buckets:
            bucket.forget_grads()
        self._context = None
        self._step, self.steps_done = self._step + 1, self.steps_done + 1
        self.bytes_sent, self.bytes_between_hosts = self._sent, self._sent_between_hosts
        self._sent = self._sent_between_hosts = 0
        self.clock.note_encoded(delivered)
        self.clock.note_end()
        if self.observer is not None:
            self.observer.step_done(self)

    def note_stock_step(self, sent: int) -> None:
        """Count a step that the stock framework has exchanged, with so many bytes."""
        self.clock.note_last_gradient()
        self._step, self.steps_done = self._step + 1, self.steps_done + 1
        self.bytes_sent = self.bytes_between_hosts = sent
        self.clock.note_end()

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
        bucket.complete()
        if self._context is None:
            self._context = self._make_context()
        if self.observer is not None:
            self.observer.before(bucket)
        acc = bucket.collect(self._context)
        if self.observer is not None:
            self.observer.collected(bucket)
        bucket.round, bucket.running = 0, bucket.exchange(acc, self.network.world)
        self._resume(bucket, None)
        self.clock.note_encoded(began)

    def _make_context(self) -> StepContext:
        names, momenta = tuple(self.layers), {}
        if self._momentum is not None:
            taken = {bucket.layout: self._momentum.of(bucket.layout) for bucket in self.buckets}
            momenta = {layout: momentum for layout, momentum in taken.items() if momentum is not None}
        found = None if self.rates is None else self.rates(names)
        rates = None if found is None else dict(zip(names, found, strict=True))
        follows = rates is not None and (bool(momenta) or self._linear())
        frozen = frozenset(names[i] for i in self._frozen(names))
        scales = {bucket.layout.device: self.delivery.loss_scale(bucket) for bucket in self.buckets if bucket.unscales}
        return StepContext(self.memory, self.network.world.size, rates, follows, frozen, momenta, scales)

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
            deliver = self._deliver or partial(self.delivery.write, scale=self.scale, step=self._step)
            deliver(bucket, end.value)
            self.memory.give_back(end.value)
        else:
            self._sent += bytes_of(request)
            self._sent_between_hosts += bytes_of(request, self.network.world.on_other_host)
            self.clock.note_request()
            bucket.answer = self.network.start(request, f"bucket {bucket.index}, request {bucket.round}")
            bucket.round += 1

    def stats(self) -> dict[str, Any]:
        """Return figures of the last step. compression: dense float32 bytes over all bytes handed to the network.

        health: of each bucket's residual, at the last measurement (Health).
        """
        dense = 4 * sum(layer.size for layer in self.layers.values())
        return {
            **{name: figure for bucket in self.buckets for name, figure in bucket.compressor.stats(bucket.inner).items()},
            "health": [health for bucket in self.buckets if (health := bucket.health) is not None],
            "steps": self.steps_done,
            "buckets": len(self.buckets),
            "overlap": not any(bucket.traits.whole_model for bucket in self.buckets),
            "bytes_dense": dense,
            "bytes_sent": self.bytes_sent,
            "bytes_between_hosts": self.bytes_between_hosts,
            "compression": dense / self.bytes_sent if self.bytes_sent else None,
        }
