"""Copies of the weights in an optimizer's state: one that an exchange left behind would undo it in the next step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.engine.updates.steps import warn_user

# The names of copies, also where they differ from the weights: masters, and the point from which MADGRAD computes them (x0).
# Those of schedule-free optimizers (x, y, z) move as the weights do, and keep a way of each rank's own.
_COPIES, _DRIFT = re.compile(r"master|fp32|^x0$"), re.compile(r"^[xyz]$")
# The names of what is no copy: moments of torch's and well-known optimizers, and averages that no step reads.
_OTHERS = re.compile(
    r"^(step|step_size|eta|mu|mu_product|prev|sum|acc_delta|square_avg|variance|row_var|col_var|ax|d|s|p0|state[12]|shift|hessian)$"
    r"|^(max_)?exp_|momentum|grad|ema|compensation"
)
_UNKNOWN = (
    "{optimizer} keeps {name!r} of the weights' shape, which differs from them and is no moment that gradcomp knows. If its "
    "steps compute the weights from it, they undo a part of each exchange, and the ranks drift apart. Compare the losses with "
    'DDP\'s, or use blocks over DDP: gradcomp.ddp.attach(model, "blocks")'
)


class WeightCopies:
    """The copies in one optimizer's state. One is known by its name, or has the weights' values before an exchange."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer, self._has_warned = optimizer, False

    @torch.no_grad()
    def find(self, weights: Sequence[Tensor]) -> list[str]:
        """Return the names of these weights' copies. They have the values of before an exchange."""
        copies, found = [], dict[str, list[tuple[Tensor, Tensor]]]()
        for weight in weights:
            for name, each in self._state(weight).items():
                if isinstance(each, Tensor) and each.is_floating_point() and each.shape == weight.shape:
                    found.setdefault(str(name), []).append((weight, each))
        for name, pairs in found.items():
            if _OTHERS.search(name):
                continue
            is_copy = bool(_COPIES.search(name)) or all(_are_equal(*pair) for pair in pairs)
            if is_copy or _DRIFT.search(name):
                copies.append(name)
            if not (is_copy or self._has_warned) and all(bool(weight.isfinite().all()) for weight, _ in pairs):
                self._has_warned = True
                warn_user(_UNKNOWN.format(optimizer=type(self._optimizer).__name__, name=name))
        return copies

    def move(self, names: Sequence[str], weight: Tensor, new: Tensor) -> None:
        """Move the copies of a weight as it moves. new: its value after that, which may be finer than its type."""
        for name in names:
            if (copy := self._state(weight).get(name)) is not None:
                copy.add_((new - weight).to(copy))

    def forget(self, weights: Sequence[Tensor]) -> None:
        """Let the optimizer begin anew for weights that were not finite, as its moments are not either."""
        for weight in weights:
            self._optimizer.state.pop(weight, None)

    def _state(self, weight: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(weight, {})
        return state


def _are_equal(weight: Tensor, copy: Tensor) -> bool:
    """Say whether a copy rounds to its weight, in either direction."""
    ulp = torch.finfo(weight.dtype).eps * weight.abs().clamp(min=torch.finfo(weight.dtype).tiny)
    return bool(((copy.to(weight.device) - weight).abs() <= ulp).all())
