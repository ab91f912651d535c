"""Entries of gradients, kept from the beginning of their exchange to find changes that the exchange would undo."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.engine.parameters import Slot
from gradcomp.native.memory import HostCopy

# Gradients that are looked at in every step, entries of each, and entries between two of them.
GRADIENTS = 2
ENTRIES = 16

_MESSAGE = (
    "the gradient of {name!r} was changed between backward() and step(), after its exchange had begun: the update would undo "
    "the change. To clip, write clip=C,clip_by=model with C = the norm x sqrt(ranks) into the spec, and remove the other clip. "
    "For other changes, finish the exchange first (with momentum or Adam, gradients then hold no gradients):\n"
    "    optimizer.synchronize()\n"
    "    scaler.unscale_(optimizer)  # only with a GradScaler\n"
    "    ...  # change gradients here\n"
    "    with optimizer.skip_synchronize(): optimizer.step()  # with a GradScaler: scaler.step(optimizer)"
)


class KeptEntries:
    """A few entries of a few gradients in each step. Other parameters take their turn in the next step.

    On a CPU a change is found at the end of its step. On a GPU it is found one step later, so that nobody waits for it.
    """

    def __init__(self, parameters: int):
        self._parameters = parameters
        self._seen = self._steps = 0
        self._kept: list[tuple[Slot, Tensor, Tensor, Tensor]] = []
        self._late: list[tuple[Slot, HostCopy]] = []

    def keep(self, slot: Slot) -> None:
        """Keep entries of a gradient that is complete, if it is its turn."""
        self._seen += 1
        turn = (self._seen - 1 - self._steps) % self._parameters
        grad = slot.parameter.grad
        if turn < GRADIENTS and grad is not None and not grad.is_sparse:
            entries = _entries(slot, grad, self._steps)
            if entries is not None:
                self._kept.append((slot, grad, entries, entries.clone()))

    def check(self) -> None:
        """Raise if a kept entry has changed."""
        kept, self._kept = self._kept, []
        late, self._late = self._late, []
        self._seen, self._steps = 0, self._steps + GRADIENTS
        for slot, changes in late:
            if changes.largest():
                raise RuntimeError(_MESSAGE.format(name=slot.name))
        for slot, grad, entries, before in kept:
            if grad.is_cuda and slot.parameter.grad is grad:
                self._late.append((slot, HostCopy((entries != before).sum())))
            elif slot.parameter.grad is not grad or not torch.equal(entries, before):
                raise RuntimeError(_MESSAGE.format(name=slot.name))

    def discard(self) -> None:
        """Discard all entries of a step that failed."""
        self._kept, self._late, self._seen = [], [], 0


def _entries(slot: Slot, grad: Tensor, turn: int) -> Tensor | None:
    """View some entries of a gradient, spread over it, as integers: a NaN then equals itself. Others come in the next turn.

    None for a type that nobody compresses, and for a memory order that is not the parameter's, in which a view is not flat.
    """
    ordered, integers = grad.permute(slot.order), _INTEGERS.get(grad.dtype)
    if integers is None or not ordered.is_contiguous():
        return None
    step = max(1, grad.numel() // ENTRIES)
    return ordered.view(-1)[turn % step :: step][:ENTRIES].view(integers)


_INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
