"""A bucket: layers that are exchanged together, what they keep from step to step, and the exchange under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Compressor, Layout, Steps
from gradcomp.core.requests import World
from gradcomp.engine.context import StepContext
from gradcomp.engine.feedback import Feedback
from gradcomp.engine.health import INTERVAL, Health
from gradcomp.engine.slots import Slot
from gradcomp.engine.updates.progress import Progress, Statistics
from gradcomp.native import kernels
from gradcomp.native.extension import LARGEST
from gradcomp.native.streams import Streams
from gradcomp.networks import Answer

# The types of gradients that kernels read.
GRADIENT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class Bucket:
    """Layers that are exchanged together.

    feedback: the wrapper around the compressor; None around an exact one.
    slots: of the layers, where the bucket exchanges updates of their weights; None where it is given its arrays.

    progress: what stays from step to step; None where nothing does. flat: what the compressor takes from then. inner:
    the compressor's state. steps: begun so far. grads: those that are ready. ordered_grads: of the step under way, in the
    order of the layers. count: of the layers. running: the exchange under way. has_started: an exchange has begun in this
    step. answer: waits for the reply to the latest request. round: requests so far. streams: those with work on the bucket.
    traits: of the compressor with its error feedback. of_weights: it exchanges updates of weights.
    """

    def __init__(
        self,
        index: int,
        layout: Layout,
        compressor: Compressor,
        feedback: Feedback | None,
        seed: int,
        slots: Sequence[Slot] | None = None,
    ):
        self.index, self.layout, self.compressor, self.feedback, self.seed = index, layout, compressor, feedback, seed
        for slot in slots or ():
            if slot.parameter is not None:
                check_type(slot.parameter, f"the parameter {slot.name!r}")
        self.traits = compressor.traits if feedback is None else feedback.traits
        self.of_weights = slots is not None
        self.progress: Progress | None = None
        self.flat = torch.empty(0, device=layout.device)
        self._statistics: Statistics | None = None
        self.health: Health | None = None
        if feedback is not None and (slots is not None or feedback.feedback or feedback.set_momentum):
            self.progress = Progress(layout, feedback, seed, slots)
            self.frozen = FrozenLayers(layout, self.progress.residual)
            if feedback.feedback and not feedback.inner.traits.shares_residual:
                self.health = Health(feedback, layout.names)
        else:
            self.flat = torch.zeros(layout.total, device=layout.device)
            self._statistics = None if feedback is None else Statistics(layout, feedback.inner.traits)
        self.inner: Any = compressor.init(layout, seed)
        self.steps = 0
        self.grads: dict[str, Tensor] = {}
        self.ordered_grads: Sequence[Tensor] = ()
        self.count = len(layout.names)
        self.running: Steps | None = None
        self.has_started = False
        self.answer: Answer | None = None
        self.round = 0
        self.streams = Streams(layout.device)

    def complete(self) -> None:
        """Wait for the gradients where a kernel on the current stream will. A layer without a gradient gets one of zeros."""
        if self.streams.has_streams:
            self.streams.join()
        if len(self.grads) == self.count or self.of_weights:
            return
        for name, size in zip(self.layout.names, self.layout.sizes, strict=True):
            if name not in self.grads:
                self.grads[name] = torch.zeros(size, device=self.layout.device)

    def forget_grads(self) -> None:
        """Forget the step's gradients."""
        self.grads.clear()
        self.has_started = False
        if self.streams.has_streams:
            self.streams.clear()

    def collect(self, context: StepContext) -> Acc:
        """Make the acc of a step: from the gradients alone, or from the residual and what the step adds to it."""
        if not self.of_weights:
            self.ordered_grads = [*map(self.grads.__getitem__, self.layout.names)]
        if self.feedback is None:
            kernels.flatten(self.ordered_grads, self.flat)
            return Acc(self.flat, context.memory)
        if self.streams.has_streams and self.streams.are_captured:
            raise RuntimeError(
                f"{self.feedback} counts its steps on the host, and a CUDA graph would repeat the captured step's number; "
                "capture forward and backward passes without the exchange, or use dense or blocks"
            )
        frozen = context.frozen(self.layout) if context.frozen_layers else ()
        if self.progress is None:
            return self._collect_gradients(context, frozen)
        if frozen and self.of_weights:
            frozen = self.progress.still(frozen)
        if frozen or self.frozen.residuals:
            self.frozen.put_back(frozen)
            self.frozen.set_aside(frozen)
        if self.of_weights:
            return self.progress.offer(context, self.steps, frozen)
        return self.progress.offer_given(self._copied_and_cut(self.feedback, context), context, frozen)

    def _collect_gradients(self, context: StepContext, frozen: Sequence[int]) -> Acc:
        feedback, found = self.feedback, self._statistics
        assert feedback is not None and found is not None
        grads = self._copied_and_cut(feedback, context) if feedback.clip else self.ordered_grads
        kernels.collect(grads, self.flat, found.flag, moments=found.moments, memory=context.memory)
        spans = self.layout.spans_of(frozen) if frozen else ()
        return Acc(self.flat, context.memory, None, found.flag, found.moments, context.rates(self.layout), spans)

    def _copied_and_cut(self, feedback: Feedback, context: StepContext) -> Sequence[Tensor]:
        """Copy the gradients, which are the user's, and cut the copies."""
        given = context.memory.scratch("given", self.layout.total, self.flat, "float32")
        kernels.flatten(self.ordered_grads, given)
        arrays: Sequence[Tensor] = given.split(self.layout.sizes)
        feedback.cut(arrays, context.world)
        return arrays

    def exchange(self, acc: Acc, world: World) -> Steps:
        """Start the exchange of a step."""
        feedback, compressor = self.feedback, self.compressor
        if feedback is not None and self.steps < feedback.warmup:
            compressor = feedback.compressor_after(self.steps)
        self.steps += 1
        steps = compressor.exchange(acc, self.inner, world)
        if self.health is not None and self.steps % INTERVAL == 0:
            steps = self.health.around(steps, acc)
        if self.of_weights and self.progress is not None and self.progress.noise.own is not None:
            steps = self.progress.noise.compare(steps, world)
        return steps

    def save_shared(self) -> dict[str, Any]:
        """Copy the state that all ranks must share."""
        noise = None if self.progress is None else self.progress.noise.save()
        return {"steps": self.steps, "inner": self.compressor.save_shared(self.inner), "noise": noise}

    def load_shared(self, shared: Mapping[str, Any]) -> None:
        """Continue with the shared state of another rank."""
        self.steps = shared["steps"]
        self.compressor.load_shared(self.inner, shared["inner"])
        if self.progress is not None:
            self.progress.noise.load(shared["noise"])

    def copied_residual(self) -> dict[str, Tensor]:
        """Copy the residual by layer, if it stays from step to step. A step under way goes on as without this."""
        if self.progress is None:
            return {}
        return {name: self.frozen.residual_of(layer) for layer, name in enumerate(self.layout.names)}

    def empty(self) -> None:
        """Empty the residual."""
        if self.progress is not None:
            self.frozen.residuals.clear()
            self.progress.empty()

    def put_back(self) -> None:
        """Put the residuals of frozen layers back. The next step sets them aside again."""
        if self.progress is not None:
            self.frozen.put_back()


class FrozenLayers:
    """The residuals of a bucket's frozen layers. They are set aside, and come back once the layers are unfrozen.

    Otherwise the residual of a layer that is frozen in mid-training would move it.

    residual: the bucket's. A sum of several ranks' may arrive in it while a layer is frozen.
    """

    def __init__(self, layout: Layout, residual: Tensor):
        self._spans, self._residual = layout.spans, residual
        self.residuals: dict[int, Tensor] = {}  # by layer

    def set_aside(self, frozen: Sequence[int]) -> None:
        """Set the residuals of frozen layers aside, unless they are. The layers go on with zeros."""
        for layer in frozen:
            if layer not in self.residuals:
                part = self._part(layer)
                self.residuals[layer] = part.clone()
                part.zero_()

    def put_back(self, frozen: Sequence[int] = ()) -> None:
        """Put the residuals of all layers back, but for those that stay frozen."""
        for layer in [each for each in self.residuals if each not in frozen]:
            self._part(layer).add_(self.residuals.pop(layer)).clamp_(-LARGEST, LARGEST)

    def residual_of(self, layer: int) -> Tensor:
        """Copy a layer's residual, with the part that is set aside."""
        copy, part = self._part(layer).clone(), self.residuals.get(layer)
        return copy if part is None else copy.add_(part).clamp_(-LARGEST, LARGEST)

    def _part(self, layer: int) -> Tensor:
        return self._residual[slice(*self._spans[layer])]


def check_type(grad: Tensor, subject: str) -> None:
    """Refuse a gradient of a type that kernels do not read.

    subject: the gradient's description. The message begins with it.
    """
    if grad.dtype not in GRADIENT_TYPES:
        raise TypeError(f"{subject} is {grad.dtype}; gradcomp takes float32, float16 and bfloat16")
