"""A bucket: layers that are exchanged together, the stages of their gradients, and the exchange under way."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Compressor, Layout, Steps
from gradcomp.core.requests import World
from gradcomp.engine.context import StepContext
from gradcomp.engine.stages.adam import Adam, Moments
from gradcomp.engine.stages.feedback import Feedback, Residual
from gradcomp.engine.stages.health import Health
from gradcomp.engine.stages.rates import RateCorrection
from gradcomp.engine.stages.sgd import Sgd, Velocity
from gradcomp.engine.stages.stage import Accumulation, Stage
from gradcomp.native import kernels
from gradcomp.native.extension import LARGEST
from gradcomp.native.streams import Streams
from gradcomp.networks import Answer

# The types of gradients that kernels read.
GRADIENT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class Bucket:
    """Layers that are exchanged together.

    feedback: the wrapper around the compressor; None around an exact one, whose steps start from the gradients alone.

    residual: flat. stages: of the gradients. states: by the stages' names. inner: the compressor's state. steps: begun so far,
    but for those that were undone. grads: the gradients that are ready. unused: layers without one on this rank, for which
    zeros came. squares: of each gradient, where they were measured. count: the number of layers. running: the exchange under
    way. has_started: an exchange has begun in this step. answer: waits for the reply to the latest request. round: requests
    made so far. streams: those with work on the bucket. residual_factor, layer_factors: those of the last accumulation. traits:
    of the compressor with its error feedback. keeps_residual: unsent entries stay for the next step. takes_momentum: the bucket
    applies the optimizer's momentum.
    """

    def __init__(self, index: int, layout: Layout, compressor: Compressor, feedback: Feedback | None, seed: int):
        self.index, self.layout, self.compressor, self.feedback, self.seed = index, layout, compressor, feedback, seed
        self.stages: list[Stage] = [] if feedback is None else feedback.stages()
        self.states: dict[str, Any] = {stage.name: stage.init(layout, seed) for stage in self.stages}
        self._prepares, self._afters, self._arounds = map(self._acts, ("prepare", "after", "around"))
        self.traits = compressor.traits if feedback is None else feedback.traits
        self.keeps_residual = feedback is not None and feedback.feedback
        self.takes_momentum = feedback is not None and feedback.takes_momentum
        kept = self.states.get(Residual.name)
        self.residual: Tensor = torch.zeros(layout.total, device=layout.device) if kept is None else kept.residual
        self.inner: Any = compressor.init(layout, seed)
        self.frozen = FrozenLayers(layout, self.residual)
        self.steps, self.undone, self.residual_factor = 0, 0, 0.0
        self.layer_factors: Mapping[int, float] = {}
        self._accumulation: Accumulation | None = None
        self.grads: dict[str, Tensor] = {}
        self.unused: set[str] = set()
        self.squares: Tensor | None = None
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

    @property
    def loss_scale(self) -> Tensor | None:
        """The loss scale of the step under way; None if the loss is not scaled, or the bucket's gradients stay scaled.

        They stay scaled without stages: nothing then stays that a later scale could meet.
        """
        return None if self._accumulation is None else self._accumulation.loss_scale

    @property
    def ordered_grads(self) -> list[Tensor]:
        """The gradients in the order of the layers. All must be there."""
        return [*map(self.grads.__getitem__, self.layout.names)]

    def complete(self) -> None:
        """Wait for the gradients where a kernel on the current stream will. A layer without a gradient gets one of zeros."""
        if self.streams.has_streams:
            self.streams.join()
        if len(self.grads) == self.count:
            return
        for name, size in zip(self.layout.names, self.layout.sizes, strict=True):
            if name not in self.grads:
                self.unused.add(name)
                self.grads[name] = torch.zeros(size, device=self.layout.device)

    def forget_grads(self) -> None:
        """Forget the step's gradients."""
        self.grads.clear()
        self.has_started = False
        self.unused.clear()
        if self.streams.has_streams:
            self.streams.clear()
        self._accumulation = self.squares = None

    def collect(self, context: StepContext) -> Acc:
        """Make the acc of a step from the gradients and the residual."""
        layout, grads, cuts = self.layout, self.ordered_grads, context.cuts.get(self.layout.names[0])
        if self.feedback is None:
            kernels.flatten(grads, self.residual)
            if cuts is not None:
                torch._foreach_mul_([*self.residual.split(layout.sizes)], [*cuts.unbind()])
            return Acc(self.residual, context.memory, rates=context.rates(layout))
        if self.streams.are_captured:
            raise RuntimeError(
                f"{self.feedback} counts its steps on the host, and a CUDA graph would repeat the captured step's number; "
                "capture forward and backward passes without the exchange, or use dense"
            )
        flag, scale = self.states[Residual.name].flag, context.loss_scale(layout.device)
        self._accumulation = accumulation = Accumulation(
            grads, layout, self.residual, flag, context.memory, self.steps + 1, scale, self.feedback.residual_factor
        )
        accumulation.undone = self.undone
        frozen = context.frozen(layout)
        if frozen or self.frozen:
            momentum = context.momentum(layout)
            self.frozen.put_back(self.steps, frozen)
            self.frozen.set_residual_aside(frozen)
            if momentum is not None and momentum.seeds:  # those of frozen layers are set aside, too
                self.frozen.put_arrays_back(self.steps)
            else:
                self.frozen.set_arrays_aside(frozen, self._arrays(), self.steps)
        if self.unused or frozen:
            accumulation.idle = {i for i, name in enumerate(layout.names) if name in self.unused}.union(frozen)
        for prepare, state in self._prepares:
            prepare(accumulation, state, context)
        if cuts is not None:
            accumulation.scales = cuts.clone() if accumulation.scales is None else torch.minimum(cuts, accumulation.scales)
        if accumulation.dropped:
            self.frozen.forget()
        if frozen:
            self.frozen.set_arrays_aside(frozen, self._arrays(), self.steps)
            decay = self.feedback.residual_factor or 1.0  # no frozen step counts for it
            factors = {layer: own / decay for layer, own in accumulation.layer_factors.items()}
            self.frozen.scale_residual(accumulation.residual_factor / decay, factors)
        accumulation.run()
        for after, state in self._afters:
            after(accumulation, state, context)
        self.residual_factor, self.layer_factors = accumulation.residual_factor, accumulation.layer_factors
        return accumulation.acc(context.rates(layout), frozen)

    def exchange(self, acc: Acc, world: World) -> Steps:
        """Start the exchange of a step."""
        compressor = self.compressor if self.feedback is None else self.feedback.compressor_after(self.steps)
        self.steps += 1
        steps = compressor.exchange(acc, self.inner, world)
        if self._accumulation is not None:
            for around, state in self._arounds:
                steps = around(steps, self._accumulation, state, world)
        return steps

    def save_shared(self) -> dict[str, Any]:
        """Copy the state that all ranks must share."""
        return {"steps": self.steps, "undone": self.undone, "inner": self.compressor.save_shared(self.inner)}

    def load_shared(self, shared: Mapping[str, Any]) -> None:
        """Continue with the shared state of another rank."""
        self.steps, self.undone = shared["steps"], shared["undone"]
        self.compressor.load_shared(self.inner, shared["inner"])

    def copied_residual(self) -> dict[str, Tensor]:
        """Copy the residual by layer, if it stays from step to step. A step under way goes on as without this."""
        if not self.keeps_residual:
            return {}
        return {name: self.frozen.residual_of(layer) for layer, name in enumerate(self.layout.names)}

    def put_back(self) -> None:
        """Put the arrays of frozen layers back. The next step sets them aside again."""
        self.frozen.put_back(self.steps)

    def forget(self, *, moments_only: bool) -> None:
        """Forget the moments that are kept in the optimizer's place, or all that stays from step to step."""
        self.put_back()
        for stage in self.stages:
            if stage.name == Adam.name or (stage.name == Sgd.name and self.takes_momentum) or not moments_only:
                stage.scale(self.states[stage.name], 0.0)

    def shorten(self, factor: Tensor) -> None:
        """Multiply the gradients of earlier steps by a factor, wherever they are kept. Directions have no length of theirs.

        factor: one, or one for each layer.
        """
        factor = factor.to(self.layout.device, torch.float32)
        if factor.dim():
            factor = factor.repeat_interleave(torch.tensor(self.layout.sizes, device=factor.device))
        adam: Moments | None = self.states.get(Adam.name)
        if adam is not None and adam.first is not None and adam.second is not None:
            adam.first.mul_(factor)
            adam.second.mul_(factor * factor)
            return
        if self.keeps_residual:
            self.residual.mul_(factor)
        if self.velocity is not None:
            self.velocity.mul_(factor)

    def note_rates(self, rates: tuple[float, ...], is_linear: bool) -> None:
        """Note the rates that the last update is applied with. is_linear: the optimizer is, and was perhaps unknown then."""
        if (kept := self.states.get(RateCorrection.name)) is not None:
            kept.note_late(rates, is_linear, self.steps)

    @property
    def velocity(self) -> Tensor | None:
        """The velocity that is kept in the optimizer's place, or that of the spec; None if there is none."""
        kept: Velocity | None = self.states.get(Sgd.name)
        return None if kept is None else kept.velocity

    @property
    def has_moments(self) -> bool:
        """True if moments are kept in the optimizer's place."""
        return any(stage.arrays(self.states[stage.name]) for stage in self.stages if stage.name in (Adam.name, Sgd.name))

    def moments(self) -> Mapping[str, Tensor]:
        """Return the moments that are kept in the optimizer's place, by name, as the optimizer would have them."""
        self.put_back()
        adam: Moments | None = self.states.get(Adam.name)
        return ({} if self.velocity is None else {"velocity": self.velocity}) | ({} if adam is None else adam.for_optimizer())

    def _acts(self, method: str) -> list[tuple[Any, Any]]:
        """List a method of the stages that have one of their own, each with the stage's state."""
        own = [stage for stage in self.stages if getattr(type(stage), method) is not getattr(Stage, method)]
        return [(getattr(stage, method), self.states[stage.name]) for stage in own]

    def _arrays(self) -> list[Tensor]:
        return [array for stage in self.stages for array in stage.arrays(self.states[stage.name])]


class FrozenLayers:
    """The arrays of a bucket's frozen layers, of all stages. They are set aside, and come back once the layers are unfrozen.

    Otherwise the residual of a layer that is frozen in mid-training would move it. The steps of the last sends are set aside as
    their ages, so that frozen steps do not count: an entry sent in the step before them was sent in the step before.

    residual: the bucket's. A sum of several ranks' may arrive in it while a layer is frozen; the other arrays stay as they are.
    """

    def __init__(self, layout: Layout, residual: Tensor):
        self._spans, self._residual = layout.spans, residual
        self._residuals: dict[int, Tensor] = {}  # by layer
        self._arrays: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer: each array, and the layer's part of it

    def __bool__(self) -> bool:
        return bool(self._residuals)

    def set_residual_aside(self, frozen: Sequence[int]) -> None:
        """Set the residuals of frozen layers aside, unless they are. The layers go on with zeros."""
        for layer in frozen:
            if layer not in self._residuals:
                part = self._part(self._residual, layer)
                self._residuals[layer] = part.clone()
                part.zero_()

    def set_arrays_aside(self, frozen: Sequence[int], arrays: Sequence[Tensor], steps: int) -> None:
        """Set the other arrays of frozen layers aside, unless they are. The layers go on with zeros. steps: of the bucket."""
        for layer in frozen:
            aside = self._arrays.setdefault(layer, [])
            for array in [each for each in arrays if not any(each is known for known, _ in aside)]:
                part = self._part(array, layer)
                if array.dtype == torch.uint8:  # the steps of the last sends go on
                    aside.append((array, part - steps % 256))
                else:
                    aside.append((array, part.clone()))
                    part.zero_()

    def put_back(self, steps: int, frozen: Container[int] = ()) -> None:
        """Put the residual and the arrays of all layers back, but for those that stay frozen. steps: of the bucket."""
        for layer in [each for each in self._residuals if each not in frozen]:
            self._part(self._residual, layer).add_(self._residuals.pop(layer)).clamp_(-LARGEST, LARGEST)
        self.put_arrays_back(steps, frozen)

    def put_arrays_back(self, steps: int, frozen: Container[int] = ()) -> None:
        """Put the other arrays of all layers back, but for those that stay frozen."""
        for layer in [each for each in self._arrays if each not in frozen]:
            for array, part in self._arrays.pop(layer):
                self._part(array, layer).copy_(part + steps % 256 if array.dtype == torch.uint8 else part)

    def residual_of(self, layer: int) -> Tensor:
        """Copy a layer's residual, with the part that is set aside."""
        copy, part = self._part(self._residual, layer).clone(), self._residuals.get(layer)
        return copy if part is None else copy.add_(part).clamp_(-LARGEST, LARGEST)

    def scale_residual(self, factor: float, of_layers: Mapping[int, float]) -> None:
        """Multiply the residuals by the factor that a step applies to the others. of_layers: those of single layers."""
        for layer, part in self._residuals.items():
            if (own := of_layers.get(layer, factor)) not in (0, 1):
                part.mul_(own).clamp_(-LARGEST, LARGEST)

    def forget(self) -> None:
        """Empty the residuals that were set aside, and forget the other arrays."""
        for part in self._residuals.values():
            part.zero_()
        self._arrays.clear()

    def _part(self, array: Tensor, layer: int) -> Tensor:
        return array[slice(*self._spans[layer])]


def check_type(grad: Tensor, subject: str) -> None:
    """Refuse a gradient of a type that kernels do not read.

    subject: the gradient's description. The message begins with it.
    """
    if grad.dtype not in GRADIENT_TYPES:
        raise TypeError(f"{subject} is {grad.dtype}; gradcomp takes float32, float16 and bfloat16")
