"""Entries of what a step delivered, kept until the optimizer steps, to find what changed them: a clip, usually."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from gradcomp.engine.bucket import Bucket
from gradcomp.engine.parameters import Slot
from gradcomp.native.memory import HostCopy

# What updates hold.
Holds = Literal["direction", "velocity"]
# The most entries of a layer that are kept, since few of a sparse update's are not 0; and the layers, since some have none that
# are not: the largest, and others in turn.
ENTRIES, LAYERS = 4096, 4
# A change by less than this share is rounding: by unscaling, for example.
SMALLEST_CHANGE = 0.01

_CHANGED = (
    "the gradients were changed between their exchange and step(), as clip_grad_norm_() does. With momentum=auto they hold "
)
_REMEDY = (
    ". Write clip=C,clip_by=model with C = the norm x sqrt(ranks) into the spec, which then clips each rank's own gradient, "
    "and remove the other clip; or write momentum=0 (under auto, loss=low), and the exchange is of gradients. If a GradScaler "
    "has changed them, pass it as scaler="
)
_TEXTS: dict[Holds, str] = {
    "direction": f"{_CHANGED}Adam's directions, whose length says nothing about the gradient's{_REMEDY}",
    "velocity": f"{_CHANGED}SGD's velocity, which is several times as long as the gradient{_REMEDY}",
}


class DeliveredSample:
    """A sample of some layers' updates, without the loss scale.

    A change of directions is refused; one of a velocity is warned of, once. On a GPU it is found one step later, so that nobody
    waits for the device.
    """

    def __init__(self, slots: Mapping[str, Slot]):
        self._warned = False
        self._slots = sorted(slots.values(), key=lambda slot: -slot.layer.size)
        self._kept: list[tuple[Slot, Tensor]] = []
        self._late: tuple[Holds, HostCopy] | None = None
        self._turn = 0

    def keep(self, buckets: Sequence[Bucket], loss_scale: Tensor | None) -> None:
        """Keep a sample of a step's updates, which the buckets' gradients hold."""
        self._kept, self._turn = [], self._turn + 1
        for slot in self._chosen():
            for bucket in buckets:
                if (grad := bucket.grads.get(slot.name)) is not None:
                    sample = self._sample(grad.view(-1))
                    self._kept.append((slot, sample.clone() if loss_scale is None else sample / loss_scale))

    def discard(self) -> None:
        """Discard what was kept: no step follows."""
        self._kept, self._late = [], None

    def check(self, holds: Holds) -> None:
        """Compare the gradients with the sample, before the optimizer's step. holds: what updates hold."""
        late, self._late = self._late, None
        if late is not None and late[1].largest():
            self._say(late[0])
        kept, self._kept = self._kept, []
        there = [(slot, slot.parameter.grad, before) for slot, before in kept if slot.parameter.grad is not None]
        if not there:
            return
        device = there[0][2].device
        now = [self._sample(slot.flat(grad)) for slot, grad, _ in there]
        moved = torch.stack([(own - before).abs().sum().to(device) for own, (_, _, before) in zip(now, there, strict=True)])
        was = torch.stack([before.abs().sum().to(device) for _, _, before in there])
        changed = (moved > SMALLEST_CHANGE * was).any().int().view(1)
        if changed.is_cuda:
            self._late = holds, HostCopy(changed)
        elif changed.item():
            self._say(holds)

    def _chosen(self) -> list[Slot]:
        """Choose the largest layer, and others in turn."""
        largest, others = self._slots[:1], self._slots[1:]
        begin = (LAYERS - 1) * self._turn
        return largest + [others[(begin + i) % len(others)] for i in range(min(LAYERS - 1, len(others)))]

    def _sample(self, flat: Tensor) -> Tensor:
        stride = max(1, flat.numel() // ENTRIES)
        return flat.detach()[self._turn % stride :: stride].float()  # other entries in each step: few may be sent

    def _say(self, holds: Holds) -> None:
        if holds == "direction":
            raise RuntimeError(_TEXTS[holds])
        if not self._warned:
            self._warned = True
            warnings.warn(_TEXTS[holds], stacklevel=2)
