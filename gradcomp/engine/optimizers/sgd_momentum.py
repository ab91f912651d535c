"""The momentum of torch.optim.SGD, taken over by the exchange and hidden from the optimizer while it steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradcomp.core.compressor import Layout
from gradcomp.engine.context import Decays, Momentum
from gradcomp.engine.optimizers.delivered_sample import Holds
from gradcomp.engine.optimizers.loaded_moments import LoadedMoments

# Settings that an optimizer must not apply again, since updates hold what they do.
HIDDEN = ("momentum", "weight_decay")


class SgdMomentum:
    """Hides momentum and weight decay within step(), so that schedulers read and write them at any other time.

    parameters: those that are exchanged, by name. flatten: puts a tensor of a parameter's shape, given the name, in the order
    of entries.
    """

    name: ClassVar[str] = "SGD"
    types: ClassVar[tuple[type, ...]] = (torch.optim.SGD,)
    holds: ClassVar[Holds] = "velocity"
    # The arrays of a bucket's state that stand for the optimizer's, by their names there.
    arrays: ClassVar[Mapping[str, str]] = {"momentum_buffer": "velocity"}

    def __init__(
        self,
        loaded: LoadedMoments,
        parameters: Mapping[str, torch.nn.Parameter],
        flatten: Callable[[str, Tensor], Tensor],
    ):
        self._loaded, self._parameters, self._flatten = loaded, parameters, flatten
        self._kept: dict[tuple[str, ...], tuple[Any, list[Any], Decays]] = {}
        self._shown: list[tuple[dict[str, Any], dict[str, float]]] = []

    def fits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Decide whether the momentum can be taken over: there is one, and no dampening."""
        if not isinstance(optimizer, self.types):
            return False
        first = optimizer.param_groups[0]
        kinds = {(group["momentum"], group["nesterov"], group["dampening"]) for group in optimizer.param_groups}
        return len(kinds) == 1 and first["dampening"] == 0 and first["momentum"] > 0

    def of(self, optimizer: torch.optim.Optimizer, layout: Layout, share: float, skipped: bool) -> Momentum:
        """Take the momentum over for a bucket's layers in this step.

        share: of an update that is a sum over the ranks, each rank's share of a mean; otherwise 1. skipped: the optimizer
        skipped the last step. The velocity has its weight decay, and no other one is due.
        """
        first = optimizer.param_groups[0]
        seeds: list[Tensor | None] | None = None
        if self._loaded.may_have(optimizer):
            taken = [self._loaded.take(optimizer, name, [*self.arrays]) for name in layout.names]
            seeds = [None if found is None else share * found[0] for found in taken]
        decays = {} if skipped else self._decays(optimizer, layout, share)
        return Momentum(first["momentum"], first["nesterov"], layout.sizes, seeds, decays)

    def _decays(self, optimizer: torch.optim.Optimizer, layout: Layout, share: float) -> Decays:
        """Gather the weights that decay. They are kept as long as all stays as it is, but for their values."""
        groups = optimizer.param_groups
        if not any(group["weight_decay"] for group in groups):
            return {}
        parameters = [self._parameters[name] for name in layout.names]
        facts = (
            share,
            [(id(each), len(each["params"]), each["weight_decay"], each.get("maximize")) for each in groups],
            [(each.data_ptr(), each.requires_grad) for each in parameters],
        )
        kept = self._kept.get(layout.names)
        if kept is not None and kept[0] == facts:
            return kept[2]
        decays: dict[float, tuple[list[int], list[Tensor]]] = {}
        group_of = {id(each): group for group in groups for each in group["params"]}
        for i, (name, parameter) in enumerate(zip(layout.names, parameters, strict=True)):
            group = group_of[id(parameter)]
            decay = share * (-group["weight_decay"] if group.get("maximize") else group["weight_decay"])
            if decay and parameter.requires_grad:
                layers, weights = decays.setdefault(decay, ([], []))
                layers.append(i)
                weights.append(self._flatten(name, parameter.detach()))
        found = {weight.data_ptr() for _, weights in decays.values() for weight in weights}
        if found <= {pointer for pointer, _ in facts[2]}:  # all are views, and none a copy
            self._kept[layout.names] = facts, list(groups), decays  # with the groups, so that their ids stay theirs
        return decays

    def state(
        self, group: Mapping[str, Any], parameter: Tensor, kept: Sequence[Tensor], steps: int, sums: int
    ) -> dict[str, Any]:
        """Make the optimizer's state of a parameter.

        kept: means over the ranks, in the order of arrays. sums: the number of ranks if updates are their sums; otherwise 1.
        """
        return {key: (sums * mean).to(parameter.dtype) for key, mean in zip(self.arrays, kept, strict=True)}

    def share_of_gradients(self, optimizer: torch.optim.Optimizer) -> float:
        """Return what velocities that wait are multiplied by to move weights as far, once the optimizer adds momentum."""
        return 1 - float(optimizer.param_groups[0]["momentum"])

    @property
    def hides(self) -> bool:
        return bool(self._shown)

    def hide(self, optimizer: torch.optim.Optimizer, pending: bool) -> None:
        """Hide from an optimizer that is about to step what its updates hold."""
        for group in optimizer.param_groups:
            self._shown.append((group, {name: group[name] for name in HIDDEN}))
            group.update(dict.fromkeys(HIDDEN, 0.0))

    def show(self) -> None:
        """Show what hide() has hidden, also after a step that raised an error."""
        for group, values in self._shown:
            group.update({name: value for name, value in values.items() if group[name] == 0.0})
        self._shown.clear()
