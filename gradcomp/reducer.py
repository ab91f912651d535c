"""Buckets of gradients, and the only loop that drives a compressor.

put() notes one gradient; the bucket whose last gradient has come starts its exchange at once. finish() then takes all buckets
round by round, in bucket order, to their updates. Never one bucket to its end before the next: ranks may have started them in
different orders, and would wait for one another for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gradcomp.core import Compressor, Layer, Layout, Reply, Request, Steps, World, bytes_of
from gradcomp.wrap import Memory, Source, source

GRADIENT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class Network(Protocol):
    """What moves requests between ranks. Names are the same on all ranks and for every step."""

    @property
    def world(self) -> World: ...
    def start(self, request: Request, name: str) -> Any: ...
    def finish(self, handle: Any) -> Reply: ...


@dataclass
class Bucket:
    """Layers that are exchanged together."""

    index: int
    layout: Layout
    source: Source
    memory: Memory
    grads: dict[str, Tensor] = field(default_factory=dict)
    steps: Steps | None = None
    handle: Any = None
    round: int = 0


class Plan(NamedTuple):
    """A bucket to be: its compressor, and what it is made of."""

    compressor: Compressor
    layout: Layout


def plan(layers: Mapping[str, Layer], bucket_bytes: float, compressor: Compressor) -> list[Plan]:
    """Cuts the layers into buckets of one compressor each, last layer first, since backward reaches it first. Empty layers are
    left out."""
    buckets: list[tuple[Compressor, list[str]]] = []
    open_for: dict[tuple[Compressor, torch.device], int] = {}
    filled: dict[int, float] = {}
    for name in reversed(list(layers)):
        layer = layers[name]
        if layer.size == 0:
            continue
        chosen = compressor.choose(name, layer)
        at = open_for.get((chosen, layer.device))
        most = float("inf") if chosen.whole_model else bucket_bytes
        if at is None or filled[at] + 4 * layer.size > most:
            at = open_for[chosen, layer.device] = len(buckets)
            buckets.append((chosen, []))
            filled[at] = 0.0
        buckets[at][1].append(name)
        filled[at] += 4 * layer.size
    return [
        Plan(chosen, Layout(tuple(names), tuple(layers[n].size for n in names), layers[names[0]].device))
        for chosen, names in buckets
    ]


class Reducer:
    """All buckets of one model on one rank.

    deliver(bucket, update) is called with each finished bucket's mean update, which is valid during the call only.
    rates(name) gives a layer's learning rate.
    """

    def __init__(
        self,
        compressor: Compressor,
        layers: Mapping[str, Layer],
        network: Network,
        deliver: Callable[[Bucket, Tensor], None],
        bucket_mb: float,
        seed: int,
        rates: Callable[[str], float] | None = None,
    ):
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb must be above 0, not {bucket_mb}")
        if compressor.needs_rates and rates is None:
            raise ValueError(
                "lr_revision needs the learning rates: give optimizer= to Compression or attach(), or use DistributedOptimizer"
            )
        self.network = network
        self.deliver = deliver
        self.rates = rates if compressor.reads_rates else None
        self.layers = dict(layers)
        plans = plan(layers, bucket_mb * 1e6, compressor)
        if compressor.whole_model and len(plans) > 1:
            raise ValueError("this compressor needs the whole model in one bucket, but its layers lie on different devices")
        self.buckets = [
            Bucket(i, layout, driver, driver.init(layout, seed + i))
            for i, (driver, layout) in enumerate((source(chosen), layout) for chosen, layout in plans)
        ]
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.layout.names}
        self.steps_done = 0
        self.bytes_sent = 0
        self.bytes_between_hosts = 0
        self._sending = self._leaving = 0

    def put(self, name: str, grad: Tensor) -> None:
        """Notes a layer's gradient (contiguous), which must stay as it is until its update has been delivered."""
        if grad.dtype not in GRADIENT_TYPES:
            raise TypeError(f"the gradient of {name!r} is {grad.dtype}; gradcomp takes float32, float16 and bfloat16")
        if self.layers[name].size == 0:
            return
        bucket = self._bucket_of[name]
        if name in bucket.grads:
            raise RuntimeError(f"the gradient of {name!r} came twice in one step")
        bucket.grads[name] = grad
        if len(bucket.grads) == len(bucket.layout.names):
            self._start(bucket)

    def start_all(self) -> None:
        """Starts every bucket that still waits; a layer without a gradient counts as one that is zero."""
        for bucket in self.buckets:
            if bucket.steps is None:
                self._start(bucket)

    def advance(self) -> bool:
        """One round of all buckets under way: answers in, next requests out. False once every update has been delivered."""
        live = [bucket for bucket in self.buckets if bucket.steps is not None]
        for bucket in live:
            self._resume(bucket, self.network.finish(bucket.handle))
        return bool(live)

    def finish(self) -> None:
        """Takes the step to its end: every update has been delivered."""
        self.start_all()
        while self.advance():
            pass
        self.end_step()

    def end_step(self) -> None:
        """Closes the books of a step whose updates have all been delivered."""
        self.steps_done += 1
        self.bytes_sent, self.bytes_between_hosts = self._sending, self._leaving
        self._sending = self._leaving = 0

    def abort(self) -> None:
        """Forgets the step under way, after a failure of the network."""
        self._sending = self._leaving = 0
        for bucket in self.buckets:
            if bucket.steps is not None:
                bucket.steps.close()
            bucket.steps = bucket.handle = None
            bucket.grads.clear()

    def _start(self, bucket: Bucket) -> None:
        layout = bucket.layout
        for name, size in zip(layout.names, layout.sizes, strict=True):
            if name not in bucket.grads:
                bucket.grads[name] = torch.zeros(size, device=layout.device)
        rates = None if self.rates is None else tuple(map(self.rates, layout.names))
        world = self.network.world
        acc = bucket.source.collect([bucket.grads[name] for name in layout.names], bucket.memory, world.size, rates)
        bucket.round = 0
        bucket.steps = bucket.source.exchange(acc, bucket.memory, world)
        self._resume(bucket, None)

    def _resume(self, bucket: Bucket, reply: Reply | None) -> None:
        assert bucket.steps is not None
        try:
            request = bucket.steps.send(reply)
        except StopIteration as end:
            bucket.steps = bucket.handle = None
            self.deliver(bucket, end.value)
            bucket.grads.clear()
        else:
            self._sending += bytes_of(request)
            self._leaving += bytes_of(request, self.network.world.apart)
            bucket.handle = self.network.start(request, f"{bucket.index}.{bucket.round}")
            bucket.round += 1

    def alike(self) -> str:
        """What of the compressors' states must be the same on all ranks."""
        own = (bucket.source.inner.alike(bucket.memory.inner) for bucket in self.buckets)
        return "; ".join(filter(None, own))

    def stats(self) -> dict[str, Any]:
        """Figures of the last step; a compression is dense float32 bytes over the bytes sent, but for those that a rank sent to
        others on its host by name: over bytes_between_hosts."""
        dense = 4 * sum(layer.size for layer in self.layers.values())
        own = [bucket.source.inner.stats(bucket.memory.inner) for bucket in self.buckets]
        return {
            **{name: figure for figures in own for name, figure in figures.items()},
            "steps": self.steps_done,
            "buckets": len(self.buckets),
            "overlap": not any(bucket.source.whole_model for bucket in self.buckets),
            "bytes_dense": dense,
            "bytes_sent": self.bytes_sent,
            "bytes_between_hosts": self.bytes_between_hosts,
            "compression": dense / self.bytes_between_hosts if self.bytes_between_hosts else None,
        }
