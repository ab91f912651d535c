"""Entries of gradients, kept from the beginning of their exchange to find changes that the exchange would undo."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.engine.parameters import Slot
from gradcomp.exchanges.delayed_counts import Counts

# Gradients that are looked at in every step, entries of each, and entries between two of them.
GRADIENTS = 2
ENTRIES = 16

_MESSAGE = (
    "the gradient of {name!r} was changed between backward() and step(), after its exchange had begun: the update would undo "
    "the change. Finish the exchange first:\n"
    "    optimizer.synchronize()\n"
    "    scaler.unscale_(optimizer)  # only with a GradScaler\n"
    "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # or whatever else changes gradients\n"
    "    with optimizer.skip_synchronize(): optimizer.step()  # with a GradScaler: scaler.step(optimizer)"
)


class KeptEntries:
    """A few entries of a few gradients in each step. Other parameters take their turn in the next step.

    On a CPU a change is found at the end of its step. On a GPU it is found one step later, so that nobody waits for it.
    """

    def __init__(self, parameters: int):
        self._parameters = parameters
        self._seen = self._steps = 0
        self._kept: list[tuple[Slot, Tensor, Tensor]] = []
        self._late: list[tuple[Slot, Counts]] = []

    def keep(self, slot: Slot) -> None:
        """Keep entries of a gradient that is complete, if it is its turn."""
        self._seen += 1
        turn = (self._seen - 1 - self._steps) % self._parameters
        grad = slot.parameter.grad
        if turn < GRADIENTS and grad is not None and not grad.is_sparse:
            self._kept.append((slot, grad, _entries(slot, grad).clone()))

    def check(self) -> None:
        """Raise if a kept entry has changed."""
        kept, self._kept = self._kept, []
        late, self._late = self._late, []
        self._seen, self._steps = 0, self._steps + GRADIENTS
        for slot, changes in late:
            if changes.largest():
                raise RuntimeError(_MESSAGE.format(name=slot.name))
        for slot, grad, before in kept:
            if grad.is_cuda and slot.parameter.grad is grad:
                self._late.append((slot, Counts((_entries(slot, grad) != before).sum())))
            elif slot.parameter.grad is not grad or not torch.equal(_entries(slot, grad), before):
                raise RuntimeError(_MESSAGE.format(name=slot.name))

    def discard(self) -> None:
        """Discard all entries of a step that failed."""
        self._kept, self._late, self._seen = [], [], 0


def _entries(slot: Slot, grad: Tensor) -> Tensor:
    """Return some entries of a gradient, spread over it, as integers: a NaN then equals itself."""
    flat = grad.permute(slot.order).reshape(-1)
    some = flat[:: max(1, flat.numel() // ENTRIES)][:ENTRIES]
    return some.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[grad.element_size()])
