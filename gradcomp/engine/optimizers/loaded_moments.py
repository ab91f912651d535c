"""The moments that a loaded state of an optimizer holds: velocities continue from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class LoadedMoments:
    """Moments of an optimizer's state. Each rank gets those of a parameter once; the optimizer loses them when it steps.

    parameters: by name. flatten: puts a tensor of a parameter's shape, given the name, in the order of entries.
    simulated: the number of ranks that ask for each parameter.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], flatten: Callable[[str, Tensor], Tensor], simulated: int = 1
    ):
        self._parameters, self._flatten, self._simulated = parameters, flatten, simulated
        self._waiting: dict[str, list[tuple[Tensor, ...]]] = {}
        self._steps: dict[str, int] = {}
        self._copied: dict[str, Any] = {}  # the states of optimizers that hold what was copied, by name of the parameter

    def take(self, optimizer: torch.optim.Optimizer, name: str, keys: Sequence[str]) -> tuple[Tensor, ...] | None:
        """Copy a parameter's moments from the optimizer's state. The keys name them there.

        None if there are none, or all are zeros: hvd.broadcast_optimizer_state() makes such ones, beside velocities that were
        loaded.
        """
        state = optimizer.state.get(self._parameters[name], {})
        if self._copied.get(name) is not optimizer.state and all(state.get(key) is not None for key in keys):
            self._copied[name] = optimizer.state
            if any(bool(state[key].any()) for key in keys):
                flat = tuple(self._flatten(name, state[key]).float() for key in keys)
                self._waiting[name] = [flat] * self._simulated
                self._steps[name] = int(state.get("step", 0))
        waiting = self._waiting.get(name)
        return waiting.pop() if waiting else None

    def may_have(self, optimizer: torch.optim.Optimizer) -> bool:
        """Decide whether there may be moments to take."""
        return bool(optimizer.state) or any(self._waiting.values())

    def clear(self) -> None:
        """Take what was copied out of the optimizer's state: all of it, since Adam makes its state only where it has none."""
        for name, state in self._copied.items():
            state.pop(self._parameters[name], None)
        self._copied.clear()

    def steps(self, name: str) -> int:
        """Return the steps that a parameter's moments had seen, for an optimizer that counts them."""
        return self._steps.get(name, 0)
