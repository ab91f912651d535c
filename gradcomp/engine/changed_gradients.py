"""Changes of gradients that an exchange would undo, found by samples of entries.

On a CPU a change is found in its own step. On a GPU it is found one step later, so that no step waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.engine.slots import Slot
from gradcomp.native.memory import HostCopy

# Gradients that are sampled in every step, and entries of each.
GRADIENTS, ENTRIES = 2, 16
_GRADIENT_CHANGED = (
    "the gradient of {name!r} was changed between backward() and step(), after its exchange had begun: the update would undo "
    "the change. Finish the exchange first: a clip of all gradients by one norm is then understood. For other changes, call "
    "parameter.register_hook(lambda grad: ...) once, since with momentum or Adam there are none after the exchange{lines}"
)
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
        if turn >= GRADIENTS or (grad := grad_of(slot)) is None:
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
            if grad.is_cuda and grad_of(slot) is grad:
                self._late.append((slot, HostCopy((entries != before).sum())))
            elif grad_of(slot) is not grad or not torch.equal(entries, before):
                raise self._refusal(slot)

    def discard(self) -> None:
        """Discard all entries of a step that failed."""
        self._kept, self._late, self._seen = [], [], 0

    def _refusal(self, slot: Slot) -> RuntimeError:
        return RuntimeError(_GRADIENT_CHANGED.format(name=slot.name, lines=self._lines))


def grad_of(slot: Slot) -> Tensor | None:
    """Return a parameter's gradient, unless it is sparse."""
    grad = None if slot.parameter is None else slot.parameter.grad
    return None if grad is None or grad.is_sparse else grad


def _entries(slot: Slot, grad: Tensor, turn: int) -> Tensor | None:
    """View some entries of a gradient, spread over it, as integers: a NaN then equals itself. Others come in the next turn.

    None for a type that kernels do not read, and for a memory order that is not the parameter's, in which a view is not flat.
    """
    ordered, integers = grad.permute(slot.order), _INTEGERS.get(grad.dtype)
    if integers is None or not ordered.is_contiguous():
        return None
    step = max(1, grad.numel() // ENTRIES)
    return ordered.view(-1)[turn % step :: step][:ENTRIES].view(integers)
