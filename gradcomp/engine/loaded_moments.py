"""The moments that a loaded state of an optimizer holds: velocities continue from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


class LoadedMoments:
    """Moments of an optimizer's state. Each rank gets those of a parameter once; the optimizer loses them.

    parameters: by name. flatten: puts a tensor of a parameter's shape, given the name, in the order of entries.
    simulated: the number of ranks that ask for each parameter.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], flatten: Callable[[str, Tensor], Tensor], simulated: int = 1
    ):
        self._parameters, self._flatten, self._simulated = parameters, flatten, simulated
        self._waiting: dict[str, list[tuple[Tensor, ...]]] = {}
        self._steps: dict[str, int] = {}

    def take(self, optimizer: torch.optim.Optimizer, name: str, keys: Sequence[str]) -> tuple[Tensor, ...] | None:
        """Take a parameter's moments out of the optimizer's state. The keys name them there.

        None if there are none, or all are zeros: hvd.broadcast_optimizer_state() makes such ones, beside velocities that were
        loaded.
        """
        state = optimizer.state.get(self._parameters[name], {})
        if all(state.get(key) is not None for key in keys):
            del optimizer.state[self._parameters[name]]  # all of it: Adam makes its state anew only where there is none
            if any(bool(state[key].any()) for key in keys):
                flat = tuple(self._flatten(name, state[key]).float() for key in keys)
                self._waiting[name] = [flat] * self._simulated
                self._steps[name] = int(state.get("step", 0))
        waiting = self._waiting.get(name)
        return waiting.pop() if waiting else None

    def may_have(self, optimizer: torch.optim.Optimizer) -> bool:
        """Decide whether there may be moments to take."""
        return bool(optimizer.state) or any(self._waiting.values())

    def steps(self, name: str) -> int:
        """Return the steps that a parameter's moments had seen, for an optimizer that counts them."""
        return self._steps.get(name, 0)
