"""Changes of gradients that an exchange would undo, and of updates before the optimizer steps, found by samples of entries.

On a CPU a change is found in its own step. On a GPU it is found one step later, so that no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from gradcomp.engine.optimizer_steps import warn_user
from gradcomp.engine.slots import Slot
from gradcomp.native.memory import HostCopy

# The content of updates that hold the optimizer's momentum.
Holds = Literal["direction", "velocity"]
# Gradients that are sampled in every step, and entries of each.
GRADIENTS, ENTRIES = 2, 16
# The most entries of an updated layer in a sample: sparse updates are mostly 0. The layers: the largest, and others in turn.
UPDATED_ENTRIES, LAYERS = 4096, 4
# A change by less than this share is rounding: by unscaling, for example. The first is of float32, the second of other types.
SMALLEST_CHANGE = 1e-4, 1e-2

_GRADIENT_CHANGED = (
    "the gradient of {name!r} was changed between backward() and step(), after its exchange had begun: the update would undo "
    "the change. To clip, write clip=C,clip_by=model with C = the norm x sqrt(ranks) into the spec, and remove the other clip. "
    "For other changes, call parameter.register_hook(lambda grad: ...) once; or finish the exchange first (with momentum or "
    "Adam, gradients then hold no gradients){lines}"
)
_UPDATE_CHANGED = (
    "the gradients were changed between their exchange and step(), as clip_grad_norm_() does. With momentum=auto they hold "
)
_REMEDY = (
    ". To clip, write clip=C,clip_by=model with C = the norm x sqrt(ranks) into the spec, which then clips each rank's own "
    "gradient, and remove the other clip. Change gradients otherwise, as a mask does, before their exchange: call "
    "parameter.register_hook(lambda grad: grad * mask) once, and remove the later change. Or write momentum=0 (under auto, "
    "loss=low), and the exchange is of gradients. If a GradScaler has changed them, pass it as scaler="
)
_TEXTS: dict[Holds, str] = {
    "direction": f"{_UPDATE_CHANGED}Adam's directions, with a length that says nothing about the gradient's{_REMEDY}",
    "velocity": f"{_UPDATE_CHANGED}SGD's velocity, which is several times as long as the gradient{_REMEDY}",
}
_INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


class GradientSample:
    """A few entries of a few gradients, from the beginning of their exchange to the end of the step.

    Other parameters take their turn in the next step. parameters: their number. lines: the door's, for its user to change
    gradients after their exchange.
    """

    def __init__(self, parameters: int, lines: str = ""):
        self._parameters, self._lines = parameters, lines
        self._seen = self._steps = 0
        self._kept: list[tuple[Slot, Tensor, Tensor, Tensor]] = []
        self._late: list[tuple[Slot, HostCopy]] = []

    def keep(self, slot: Slot) -> None:
        """Keep entries of a complete gradient, if it is its turn."""
        turn = (self._seen - self._steps) % self._parameters
        self._seen += 1
        if turn >= GRADIENTS or (grad := _grad_of(slot)) is None or grad.is_sparse:
            return
        entries = _entries(slot, grad, self._steps)
        if entries is not None:
            self._kept.append((slot, grad, entries, entries.clone()))

    def check(self) -> None:
        """Raise an error if a kept entry has changed."""
        kept, self._kept = self._kept, []
        late, self._late = self._late, []
        self._seen, self._steps = 0, self._steps + GRADIENTS
        for slot, changes in late:
            if changes.largest():
                raise self._refusal(slot)
        for slot, grad, entries, before in kept:
            if grad.is_cuda and _grad_of(slot) is grad:
                self._late.append((slot, HostCopy((entries != before).sum())))
            elif _grad_of(slot) is not grad or not torch.equal(entries, before):
                raise self._refusal(slot)

    def discard(self) -> None:
        """Discard all entries of a step that failed."""
        self._kept, self._late, self._seen = [], [], 0

    def _refusal(self, slot: Slot) -> RuntimeError:
        return RuntimeError(_GRADIENT_CHANGED.format(name=slot.name, lines=self._lines))


class UpdateSample:
    """Entries of some layers' updates, without the loss scale, from their delivery to the optimizer's step.

    A change of directions is refused; one of a velocity is warned of, once. is_scaled: the gradients have the loss scale until
    a scaler takes it out.
    """

    def __init__(self, slots: Sequence[Slot]):
        self._warned = self.is_scaled = False
        self._slots = sorted(slots, key=lambda slot: -slot.layer.size)
        self._kept: list[tuple[Slot, Tensor]] = []
        self._late: tuple[Holds, HostCopy] | None = None
        self._turn = 0

    def keep(self, updates: Mapping[str, Tensor], loss_scale: Tensor | None) -> None:
        """Keep a sample of a step's updates, by layer."""
        self._kept, self._turn, self.is_scaled = [], self._turn + 1, loss_scale is not None
        for slot in self._chosen():
            if (update := updates.get(slot.name)) is not None:
                sample = self._sample(update.view(-1))
                self._kept.append((slot, sample.clone() if loss_scale is None else sample / loss_scale))

    def discard(self) -> None:
        """Discard the sample: no step follows."""
        self._kept, self._late = [], None

    def check(self, holds: Holds) -> None:
        """Compare the gradients with the sample, before the optimizer's step. holds: the content of the updates."""
        late, self._late = self._late, None
        if late is not None and late[1].largest():
            self._complain(late[0])
        kept, self._kept = self._kept, []
        there = [(slot, _grad_of(slot), old) for slot, old in kept]
        now = [(self._sample(slot.flat(grad)), old, grad.dtype) for slot, grad, old in there if grad is not None]
        if not now:
            return
        device = now[0][1].device
        moved = torch.stack([(new - old).abs().sum().to(device) for new, old, _ in now])
        least = torch.stack([SMALLEST_CHANGE[form != torch.float32] * old.abs().sum().to(device) for _, old, form in now])
        changed = (moved > least).any().int().view(1)
        if changed.is_cuda:
            self._late = holds, HostCopy(changed)
        elif changed.item():
            self._complain(holds)

    def _chosen(self) -> list[Slot]:
        """Choose the largest layer, and others in turn."""
        largest, others = self._slots[:1], self._slots[1:]
        begin = (LAYERS - 1) * self._turn
        return largest + [others[(begin + i) % len(others)] for i in range(min(LAYERS - 1, len(others)))]

    def _sample(self, flat: Tensor) -> Tensor:
        stride = max(1, flat.numel() // UPDATED_ENTRIES)
        return flat.detach()[self._turn % stride :: stride].float()  # other entries in each step: few may be sent

    def _complain(self, holds: Holds) -> None:
        if holds == "direction":
            raise RuntimeError(_TEXTS[holds])
        if not self._warned:
            self._warned = True
            warn_user(_TEXTS[holds])


def _grad_of(slot: Slot) -> Tensor | None:
    return None if slot.parameter is None else slot.parameter.grad


def _entries(slot: Slot, grad: Tensor, turn: int) -> Tensor | None:
    """View some entries of a gradient, spread over it, as integers: a NaN then equals itself. Others come in the next turn.

    None for a type that kernels do not read, and for a memory order that is not the parameter's, in which a view is not flat.
    """
    ordered, integers = grad.permute(slot.order), _INTEGERS.get(grad.dtype)
    if integers is None or not ordered.is_contiguous():
        return None
    step = max(1, grad.numel() // ENTRIES)
    return ordered.view(-1)[turn % step :: step][:ENTRIES].view(integers)
