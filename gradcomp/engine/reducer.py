"""Buckets of gradients, and the only loop that drives a compressor.

mark_ready() notes one gradient. A bucket starts its exchange as soon as its last gradient is ready. finish_step() takes all
buckets to their updates, round by round, in bucket order. It never takes one bucket to its end before the next: ranks may have
started their buckets in different orders and would wait for one another for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcomp.engine.feedback import BucketState, Source
from gradcomp.engine.plan import plan
from gradcomp.native import kernels
from gradcomp.native.memory import Memory, Update
from gradcomp.networks import Answer, Network
from gradcomp.protocol import Compressor, Layer, Layout, Steps
from gradcomp.requests import Gather, Reduce, Reply, Request, Send

GRADIENT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Bucket:
    """Layers that are exchanged together."""

    index: int
    layout: Layout
    source: Source
    state: BucketState
    grads: dict[str, Tensor] = field(default_factory=dict)
    steps: Steps | None = None
    answer: Answer | None = None
    round: int = 0


class Reducer:
    """All buckets of one model on one rank.

    rates(name) gives a layer's learning rate. deliver(bucket, update) is called with each finished bucket's mean update, which
    is valid during the call; without it the update is written into the gradients. memory: a pool of its own by default.
    """

    def __init__(
        self,
        compressor: Compressor,
        layers: Mapping[str, Layer],
        network: Network,
        bucket_mb: float,
        seed: int,
        *,
        rates: Callable[[str], float] | None = None,
        deliver: Callable[[Bucket, Update], None] | None = None,
        memory: Memory | None = None,
    ):
        needs = compressor.traits.rates
        if needs == "needed" and rates is None:
            raise ValueError(f"{compressor} needs the learning rates: pass optimizer=")
        self.network, self.layers = network, dict(layers)
        self.rates = None if needs == "unused" else rates
        self.memory = Memory() if memory is None else memory
        self.buckets = [
            Bucket(i, layout, source, source.init(layout, seed + i))
            for i, (source, layout) in enumerate(plan(layers, bucket_mb, compressor))
        ]
        self._deliver = deliver or self._write
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.layout.names}
        self.scale = 1.0
        self.steps_done = 0
        self.bytes_sent = 0
        self.bytes_between_hosts = 0
        self._sending = self._leaving = 0

    def mark_ready(self, name: str, grad: Tensor) -> None:
        """Note a layer's gradient (contiguous), which must stay as it is until its update has been delivered."""
        check_type(grad, f"the gradient of {name!r}")
        if self.layers[name].size == 0:
            return
        bucket = self._bucket_of[name]
        if name in bucket.grads:
            raise RuntimeError(f"the gradient of {name!r} came twice in one step")
        bucket.grads[name] = grad
        if len(bucket.grads) == len(bucket.layout.names):
            self._start(bucket)

    def start_all(self) -> None:
        """Start every bucket that still waits; a layer without a gradient counts as one that is zero."""
        for bucket in self.buckets:
            if bucket.steps is None:
                self._start(bucket)

    def advance(self) -> bool:
        """Take all buckets under way one round on: answers in, next requests out. False once every update is delivered."""
        live = [bucket for bucket in self.buckets if bucket.answer is not None]
        for bucket in live:
            assert bucket.answer is not None
            self._resume(bucket, bucket.answer())
        return bool(live)

    def finish_step(self, scale: float = 1.0) -> None:
        """Take the step to its end: all gradients are then scale times the mean update."""
        self.scale = scale
        self.start_all()
        while self.advance():
            pass
        self.end_step()

    def end_step(self) -> None:
        """Close the books of a step whose updates have all been delivered."""
        self.steps_done += 1
        self.bytes_sent, self.bytes_between_hosts = self._sending, self._leaving
        self._sending = self._leaving = 0

    def abort(self) -> None:
        """Forget the step under way, after a failure of the network."""
        self._sending = self._leaving = 0
        for bucket in self.buckets:
            if bucket.steps is not None:
                bucket.steps.close()
            bucket.steps = bucket.answer = None
            bucket.grads.clear()

    def _start(self, bucket: Bucket) -> None:
        layout, source, world = bucket.layout, bucket.source, self.network.world
        for name, size in zip(layout.names, layout.sizes, strict=True):
            if name not in bucket.grads:
                bucket.grads[name] = torch.zeros(size, device=layout.device)
        rates = None if self.rates is None else tuple(map(self.rates, layout.names))
        grads = [bucket.grads[name] for name in layout.names]
        acc = source.collect(grads, bucket.state, self.memory, world.size, rates)
        bucket.round = 0
        bucket.steps = source.exchange(acc, bucket.state, world)
        self._resume(bucket, None)

    def _resume(self, bucket: Bucket, reply: Reply | None) -> None:
        assert bucket.steps is not None
        try:
            request = bucket.steps.send(reply)
        except StopIteration as end:
            bucket.steps = bucket.answer = None
            if not isinstance(end.value, Update):
                raise TypeError(
                    f"{bucket.source.inner} returned a {type(end.value).__name__}; an exchange returns an Update"
                ) from None
            self._deliver(bucket, end.value)
            self.memory.give_back(end.value)
            bucket.grads.clear()
        else:
            self._sending += bytes_of(request)
            self._leaving += bytes_of(request, self.network.world.apart)
            bucket.answer = self.network.start(request, f"{bucket.index}.{bucket.round}")
            bucket.round += 1

    def _write(self, bucket: Bucket, update: Update) -> None:
        """Write an update into the gradients' own memory."""
        kernels.spread(update.flat, [bucket.grads[name] for name in bucket.layout.names], self.scale, update.marks)

    def alike(self) -> str:
        """Describe what of the compressors' states must be the same on all ranks."""
        return "; ".join(filter(None, (bucket.source.alike(bucket.state) for bucket in self.buckets)))

    def stats(self) -> dict[str, Any]:
        """Give figures of the last step. compression: dense float32 bytes over all bytes handed to the network."""
        dense = 4 * sum(layer.size for layer in self.layers.values())
        own = [bucket.source.stats(bucket.state) for bucket in self.buckets]
        return {
            **{name: figure for figures in own for name, figure in figures.items()},
            "steps": self.steps_done,
            "buckets": len(self.buckets),
            "overlap": not any(bucket.source.traits.whole_model for bucket in self.buckets),
            "bytes_dense": dense,
            "bytes_sent": self.bytes_sent,
            "bytes_between_hosts": self.bytes_between_hosts,
            "compression": dense / self.bytes_sent if self.bytes_sent else None,
        }


def check_type(grad: Tensor, whose: str) -> None:
    """Refuse a gradient of a type that kernels do not read."""
    if grad.dtype not in GRADIENT_TYPES:
        raise TypeError(f"{whose} is {grad.dtype}; gradcomp takes float32, float16 and bfloat16")


def bytes_of(request: Request, goes: Callable[[int], bool] = lambda rank: True) -> int:
    """What a rank hands to the network: a gather's capacity, a reduction's tensor, of a send the parts that go somewhere."""
    match request:
        case Gather(payload):
            return payload.bytes.numel()
        case Reduce(tensor):
            return tensor.numel() * tensor.element_size()
        case Send(payloads):
            return sum(payload.bytes.numel() for rank, payload in payloads.items() if goes(rank))
