"""A bucket: layers that are exchanged together, what they keep from step to step, and the exchange under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Compressor, Layout, Steps
from gradcomp.core.requests import World
from gradcomp.engine.context import StepContext
from gradcomp.engine.slots import Slot
from gradcomp.engine.stages.feedback import Feedback, Residual
from gradcomp.engine.stages.health import Health
from gradcomp.engine.stages.stage import Accumulation, Stage
from gradcomp.engine.updates.progress import Progress, StepRule
from gradcomp.native import kernels
from gradcomp.native.extension import LARGEST
from gradcomp.native.streams import Streams
from gradcomp.networks import Answer

# The types of gradients that kernels read.
GRADIENT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class Bucket:
    """Layers that are exchanged together.

    feedback: the wrapper around the compressor; None around an exact one, whose steps start from the gradients alone.
    slots: of the layers, where the bucket exchanges updates of their weights; None where it exchanges gradients.

    residual: flat. stages: of the gradients. states: by the stages' names. inner: the compressor's state. steps: begun so far.
    grads: the gradients that are ready. ordered_grads: of the step under way, in the order of the layers. count: the number of
    layers. running: the exchange under way. has_started: an exchange has begun in this step. answer: waits for the reply to
    the latest request. round: requests made so far. streams: those with work on the bucket. traits: of the compressor with its
    error feedback. keeps_residual: unsent entries stay for the next step. of_weights: it exchanges updates of weights.
    progress: of the weights, or of gradients with a momentum of the spec's; None for others.
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
        self.stages: list[Stage] = []
        if feedback is not None:
            self.stages = feedback.stages() if slots is None else feedback.stages_of_updates()
        self.states: dict[str, Any] = {stage.name: stage.init(layout, seed) for stage in self.stages}
        self._prepares = [(each.prepare, self.states[each.name]) for each in self.stages]
        self._arounds = [(each.interval, each.around, self.states[each.name]) for each in self.stages if each.interval]
        self.traits = compressor.traits if feedback is None else feedback.traits
        self.of_weights = slots is not None and feedback is not None
        self.keeps_residual = feedback is not None and (feedback.feedback or self.of_weights or feedback.set_momentum > 0)
        kept: Any = self.states.get(Residual.name)
        self.residual: Tensor = torch.zeros(layout.total, device=layout.device) if kept is None else kept.residual
        self.inner: Any = compressor.init(layout, seed)
        self.frozen = FrozenLayers(layout, self.residual)
        self.progress: Progress | None = None
        if feedback is not None and (slots is not None or feedback.set_momentum):
            self.progress = Progress(layout, self.residual, seed, slots)
            if slots is None and feedback.given_momentum is not None:
                self.progress.rule = StepRule(feedback.given_momentum)
            self.progress.selects, self.progress.keeps_rest = self.traits.selects, feedback.feedback
            self.progress.flag, self.progress.moments, self.progress.peaks = kept.flag, kept.moments, kept.peaks
        self.steps = 0
        self.grads: dict[str, Tensor] = {}
        self.ordered_grads: Sequence[Tensor] = ()
        self.count = len(layout.names)
        self.running: Steps | None = None
        self.has_started = False
        self.answer: Answer | None = None
        self.round = 0
        self.streams = Streams(layout.device)

    @property
    def health(self) -> dict[str, Any] | None:
        """The figures of the residual's health, and the layers; None where nothing was measured."""
        measured = self.states.get(Health.name)
        return {"layers": list(self.layout.names), **measured.figures} if measured and measured.figures else None

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
        """Make the acc of a step: from the gradients and the residual, or from the progress of the weights."""
        if self.feedback is None:
            self.ordered_grads = [*map(self.grads.__getitem__, self.layout.names)]
            kernels.flatten(self.ordered_grads, self.residual)
            return Acc(self.residual, context.memory)
        if self.streams.has_streams and self.streams.are_captured:
            raise RuntimeError(
                f"{self.feedback} counts its steps on the host, and a CUDA graph would repeat the captured step's number; "
                "capture forward and backward passes without the exchange, or use dense or blocks"
            )
        frozen = context.frozen(self.layout) if context.frozen_layers else ()
        if frozen or self.frozen.residuals:
            self.frozen.put_back(frozen)
            self.frozen.set_aside(frozen)
        if self.of_weights:
            return self._collect_progress(context, frozen)
        self.ordered_grads = [*map(self.grads.__getitem__, self.layout.names)]
        accumulation = Accumulation(
            self.ordered_grads,
            self.layout,
            self.residual,
            self.states[Residual.name].flag,
            context.memory,
            self.feedback.residual_factor,
        )
        for prepare, state in self._prepares:
            prepare(accumulation, state, context)
        if self.progress is not None:
            return self._collect_progress(context, frozen, accumulation.cut())
        accumulation.run()
        return accumulation.acc(context.rates(self.layout), frozen)

    def _collect_progress(self, context: StepContext, frozen: Sequence[int], grads: Sequence[Tensor] = ()) -> Acc:
        """Offer the progress of the weights, or of gradients, whose ages are saved with the residual."""
        progress, kept = self.progress, self.states[Residual.name]
        assert progress is not None and self.feedback is not None
        progress.ages = kept.ages
        decay = self.feedback.decay
        if self.of_weights:
            acc = progress.offer(context, self.steps, decay, frozen)
        else:
            acc = progress.offer_of_gradients(grads, context, decay, frozen)
        kept.ages = progress.ages
        return acc

    def exchange(self, acc: Acc, world: World) -> Steps:
        """Start the exchange of a step."""
        feedback, compressor = self.feedback, self.compressor
        if feedback is not None and self.steps < feedback.warmup:
            compressor = feedback.compressor_after(self.steps)
        self.steps += 1
        steps = compressor.exchange(acc, self.inner, world)
        for every, around, state in self._arounds:
            if self.steps % every == 0:
                steps = around(steps, acc, state)
        if self.of_weights and self.progress is not None and self.progress.noise.own is not None:
            steps = self.progress.noise.compare(steps, world)
        return steps

    def save_shared(self) -> dict[str, Any]:
        """Copy the state that all ranks must share."""
        return {"steps": self.steps, "inner": self.compressor.save_shared(self.inner)}

    def load_shared(self, shared: Mapping[str, Any]) -> None:
        """Continue with the shared state of another rank."""
        self.steps = shared["steps"]
        self.compressor.load_shared(self.inner, shared["inner"])

    def copied_residual(self) -> dict[str, Tensor]:
        """Copy the residual by layer, if it stays from step to step. A step under way goes on as without this."""
        if not self.keeps_residual:
            return {}
        return {name: self.frozen.residual_of(layer) for layer, name in enumerate(self.layout.names)}

    def empty(self) -> None:
        """Empty the residual."""
        self.frozen.residuals.clear()
        self.residual.zero_()
        if (ages := self.states[Residual.name].ages) is not None:
            ages.zero_()

    def make_ages(self) -> None:
        """Begin to count ages, of all that waits as of a moment that is about to join it: at once, it would be a long step."""
        kept = self.states[Residual.name]
        if kept.ages is None and self.progress is not None and self.progress.selects:
            kept.ages = torch.zeros(self.layout.total, dtype=torch.uint8, device=self.layout.device)

    def put_back(self) -> None:
        """Put the residuals of frozen layers back. The next step sets them aside again."""
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
