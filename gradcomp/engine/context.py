"""The context of a step: the facts that all buckets of a step share, made once a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.core.compressor import Layout
from gradcomp.core.requests import World
from gradcomp.native.memory import Memory

# The learning rate of each layer; None where no optimizer is known.
Rates = tuple[float, ...] | None
# In place of a layer's rate. UNKNOWN: no rate is known. ANY: the residual is empty, and any rate will do.
UNKNOWN, ANY = -1.0, math.inf
# By weight decay: the numbers of the layers that it acts on, and their weights in the order of entries.
Decays = Mapping[float, tuple[list[int], list[Tensor]]]
# For each layer the moments to continue from, or None; None if there are none at all.
Seeds = Sequence[tuple[Tensor, ...] | None] | None


class LayerRates(dict[str, float]):
    """The learning rates by layer. Those of a bucket are made at the first question, for all steps with the same rates."""

    def __init__(self, rates: Mapping[str, float]):
        super().__init__(rates)
        self._of: dict[tuple[str, ...], tuple[float, ...]] = {}

    def of(self, names: tuple[str, ...]) -> tuple[float, ...]:
        """Return the rates of these layers."""
        found = self._of.get(names)
        if found is None:
            found = self._of[names] = tuple([self[name] for name in names])
        return found


class Momentum(NamedTuple):
    """The optimizer's momentum in a step of a bucket, which its velocity is to apply.

    decay_factor: of the decays, on the device; None stands for 1.
    """

    value: float
    nesterov: bool
    seeds: Seeds
    decays: Decays
    decay_factor: Tensor | None = None


class AdamStep(NamedTuple):
    """The settings of Adam's moments in a step of a bucket.

    share: the factor of a direction. steps: of each layer's seeds. skipped: the optimizer skipped the last step, since a
    gradient was not finite. compares: all ranks know Adam, and may compare their noise. decays: of the weights that are
    added to gradients.
    """

    betas: tuple[float, float]
    epsilon: float
    share: float
    seeds: Seeds
    steps: Sequence[int]
    skipped: bool
    compares: bool
    decays: Decays


class LossScale:
    """The loss scale of a GradScaler. It is read where the gradients lie, so that no step waits for a device.

    Residuals and velocities are kept without it. Otherwise unsent entries would count double after the scale has halved.
    """

    def __init__(self, scaler: Any):
        enabled = getattr(scaler, "is_enabled", None)
        # A scaler offers its scale in public only as a number, for which the host would have to wait for a GPU.
        if enabled is None or (enabled() and not hasattr(scaler, "_scale")):
            raise TypeError(
                f"scaler= is a {type(scaler).__name__}, and its scale cannot be read; pass the training's torch.amp.GradScaler"
            )
        self.scaler = scaler

    def on(self, device: torch.device) -> Tensor | None:
        """Return the current scale, as one float on a device. None before the first loss is scaled, and if scaling is off."""
        scale: Tensor | None = self.scaler._scale if self.scaler.is_enabled() else None
        # A copy to a CPU would not have ended when it is read.
        return None if scale is None else scale.detach().reshape(1).to(device, torch.float32, non_blocking=device.type != "cpu")


@dataclass(eq=False)
class StepContext:
    """The facts of a step that do not depend on its gradients. All buckets of the step read the same ones.

    memory: the lender of scratch. world: the ranks of the exchange. layer_rates: the learning rates by layer;
    None where no optimizer is known, or the compressor does not use them. follows_rates: by their first layers, the buckets
    that keep the rates that the residual was found under: those of linear optimizers. frozen_layers: the names of all frozen
    layers. momenta: by a bucket's first layer, the optimizer's momentum where the exchange has taken it over. loss_scales: by
    device, the scale of the loss as one float there. generation: of the optimizer's state (Origin). cuts: by a bucket's first
    layer, the factors of its layers' gradients, where the user clips.
    """

    memory: Memory
    world: World
    layer_rates: LayerRates | None = None
    follows_rates: frozenset[str] = frozenset()
    frozen_layers: frozenset[str] = frozenset()
    momenta: Mapping[str, Momentum | AdamStep] = field(default_factory=dict)
    loss_scales: Mapping[torch.device, Tensor | None] = field(default_factory=dict)
    generation: tuple[int, int] = (0, 0)
    cuts: dict[str, Tensor] = field(default_factory=dict)

    def rates(self, layout: Layout) -> Rates:
        """Return the learning rate of each layer of a bucket."""
        return None if self.layer_rates is None else self.layer_rates.of(layout.names)

    def own_rates(self, layout: Layout) -> Rates:
        """Return the rates that the residual is to keep; None where the optimizer does not allow it."""
        return self.rates(layout) if layout.names[0] in self.follows_rates else None

    def momentum(self, layout: Layout) -> Momentum | AdamStep | None:
        """Return the optimizer's momentum for a bucket that applies it."""
        return self.momenta.get(layout.names[0]) if self.momenta else None

    def frozen(self, layout: Layout) -> Sequence[int]:
        """Return the numbers of a bucket's frozen layers."""
        frozen = self.frozen_layers
        return [i for i, name in enumerate(layout.names) if name in frozen] if frozen else ()

    def loss_scale(self, device: torch.device) -> Tensor | None:
        """Return the factor of the loss, as one float on a device; None where the loss is not scaled."""
        return self.loss_scales.get(device)
