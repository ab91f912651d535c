"""A bucket: layers that are exchanged together, and the exchange in progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Layout, Steps
from gradcomp.engine.buckets.collector import BucketState, Collector
from gradcomp.native.streams import Streams
from gradcomp.networks import Answer

# The types of gradients that kernels read.
GRADIENT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Bucket:
    """Layers that are exchanged together.

    grads: the gradients that are ready. running: the exchange in progress. answer: waits for the reply to the latest request.
    round: requests made so far. streams: those with work on the bucket.
    """

    index: int
    layout: Layout
    collector: Collector
    seed: int
    state: BucketState
    grads: dict[str, Tensor] = field(default_factory=dict)
    running: Steps | None = None
    answer: Answer | None = None
    round: int = 0
    streams: Streams = field(init=False)

    def __post_init__(self) -> None:
        self.streams = Streams(self.layout.device)

    def complete(self) -> None:
        """Wait for the gradients where a kernel on the current stream will. A layer without a gradient gets one of zeros."""
        self.streams.join()
        if len(self.grads) == len(self.layout.names):
            return
        for name, size in zip(self.layout.names, self.layout.sizes, strict=True):
            if name not in self.grads:
                self.grads[name] = torch.zeros(size, device=self.layout.device)

    def forget_grads(self) -> None:
        """Forget the step's gradients."""
        self.grads.clear()
        self.streams.clear()

    @property
    def health(self) -> dict[str, Any] | None:
        """The figures of the residual's health, and the layers; None where nothing was measured."""
        if self.state.health is None or not self.state.health.figures:
            return None
        return {"layers": list(self.layout.names), **self.state.health.figures}

    @property
    def ordered_grads(self) -> list[Tensor]:
        """The gradients in the order of the layers. All must be there."""
        return [self.grads[name] for name in self.layout.names]


def check_type(grad: Tensor, subject: str) -> None:
    """Refuse a gradient of a type that kernels do not read.

    subject: the gradient's description. The message begins with it.
    """
    if grad.dtype not in GRADIENT_TYPES:
        raise TypeError(f"{subject} is {grad.dtype}; gradcomp takes float32, float16 and bfloat16")
