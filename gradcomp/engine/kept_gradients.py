"""Gradients that the user keeps after a step: this rank's own, in the place of updates that hold the optimizer's momentum."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.engine.acting_optimizer import parameters_of
from gradcomp.engine.optimizer_steps import warn_user
from gradcomp.engine.optimizer_view import OptimizerView
from gradcomp.engine.slots import Slots
from gradcomp.engine.stages.stage import cut_factors

_LATE = (
    "the gradients of an earlier step were still there when a backward pass added to them. They held an update with the "
    "optimizer's momentum, which is no gradient: this once they were set to zero first. From now on this rank's own gradients "
    "come back after each step, and such a loop trains as in torch. If it is a slip, call zero_grad() after each step"
)


class KeptGradients:
    """This rank's own gradients, which come back after a step has applied an update that holds momentum.

    Gradients that a user keeps, whole or changed, are added to the next ones, and exchanged with them: an update would count as
    a gradient. After each of the first steps the own gradients come back, and the next backward pass looks at them. If it finds
    some, they always come back. Otherwise later passes look at their first gradient alone, and find one that nobody changed.

    trial: the steps after which own gradients come back at first. is_kept: a backward pass has found gradients.
    """

    def __init__(self, slots: Slots, view: OptimizerView, trial: int):
        self._slots, self._view, self._trial = slots, view, trial
        self.is_kept = self._looks = self._looks_at_all = False
        self._own: dict[int, Tensor] = {}  # by the ids of parameters
        self._is_raw = True  # they are as they were exchanged
        self._hooks: dict[str, tuple[Any, Any]] = {}  # nodes of the graph, which live as long as somebody has them
        self._first = ""  # the layer with the first gradient of a backward pass
        self._left: tuple[Any, int] = (lambda: None), 0  # refers to its gradient after a step; the gradient's version
        self._late = 0  # 2: the next exchange lacks gradients that were kept; 1: the last one does

    @property
    def needs_copies(self) -> bool:
        """True if the own gradients of the next exchange are to come back."""
        return self.is_kept or self._trial > 0

    def begin(self) -> None:
        """Begin an exchange."""
        self._own.clear()
        self._late = max(0, self._late - 1)

    def take(self, own: Sequence[tuple[torch.nn.Parameter, Tensor]]) -> None:
        """Take the own gradients of an exchange that a step is about to apply."""
        if self._late:
            self._late = 0
            warn_user(_LATE)
        if self._view.taken and self.needs_copies:
            self._own, self._is_raw = {id(parameter): grad for parameter, grad in own}, True

    @torch.no_grad()
    def give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the own gradients in the place of updates that an optimizer has applied: zeros, where this rank had none."""
        if self._own and self._is_raw:
            self._make_torchs()
        for parameter in parameters_of(optimizer) if self._own else ():
            if parameter.grad is not None and parameter.requires_grad and self._slots.slot(parameter) is not None:
                own = self._own.pop(id(parameter), None)
                parameter.grad.zero_() if own is None else parameter.grad.copy_(own)
        if self._view.taken and (self._trial or self._hooks):
            self._watch()

    def _make_torchs(self) -> None:
        """Make gradients what torch would leave: without the loss scale, cut, and with sums over the ranks on each of them."""
        view, self._is_raw = self._view, False
        ranks = view.summed
        for grad in self._own.values():
            scale = view.loss_scale_on(grad.device)
            if ranks > 1 or scale is not None:
                grad.mul_(ranks if scale is None else ranks / scale.squeeze())
        for clip, names in view.bounds():
            if cut := [own for name in names if (own := self._own.get(id(self._slots.parameters[name]))) is not None]:
                norm = torch.stack([torch.linalg.vector_norm(each, dtype=torch.float32) for each in cut]).norm()
                torch._foreach_mul_(cut, cut_factors(math.inf if clip.bound is None else clip.bound, norm))

    def _watch(self) -> None:
        """Look at gradients before the next backward pass adds to them."""
        if not self._hooks:
            own = weakref.ref(self)  # torch, which has the nodes, is not to have the session
            for name, parameter in self._slots.parameters.items():
                if parameter.requires_grad:

                    def look(grads: Any, name: str = name) -> None:
                        if (kept := own()) is not None and kept._looks:
                            kept._look(name)

                    with torch.enable_grad():
                        node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                    self._hooks[name] = node, node.register_prehook(look)
        if not self._trial:
            for name in [each for each in self._hooks if self.is_kept or each != self._first]:
                self._hooks.pop(name)[1].remove()
        if self._first and (grad := self._slots.parameters[self._first].grad) is not None:
            self._left = weakref.ref(grad), grad._version
        self._looks, self._looks_at_all, self._trial = bool(self._hooks), self._trial > 0, max(0, self._trial - 1)

    @torch.no_grad()
    def _look(self, name: str) -> None:
        self._looks, self._first = False, name
        own, left = self._slots.parameters[name].grad, self._left
        is_same = own is not None and own is left[0]() and own._version == left[1]
        grads = [each.grad for each in self._slots.parameters.values() if each.grad is not None]
        if self._looks_at_all:
            if any(bool(each.any()) for each in grads):  # this waits for a device
                self.is_kept, self._trial = True, 0
            elif is_same:  # versions do not show that the program sets .grad.data to zero
                self._first, self._trial = "", 0
        elif is_same:
            self.is_kept, self._late = True, 2
            torch._foreach_zero_(grads)
