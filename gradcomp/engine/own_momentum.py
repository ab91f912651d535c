"""The momentum of an SGD optimizer, taken over by the exchange and hidden from the optimizer while it steps."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradcomp.engine import optimizers
from gradcomp.engine.collector import Momentum
from gradcomp.protocol import Layout

# Those of all sessions and simulations that live.
_every: weakref.WeakSet[OwnMomentum] = weakref.WeakSet()
# What an optimizer must not apply again, since updates hold it.
HIDDEN = ("momentum", "weight_decay")


class OwnMomentum:
    """The momentum of the optimizer that trains some parameters, for specs with momentum=auto.

    The optimizer's groups show the user's values except within step(), so that schedulers read and write them at any time. A
    momentum_buffer, which only a loaded state has, goes over into the velocity.

    The momentum is left to the optimizer if that is not SGD, if it has dampening or several momenta, or if it trains other
    parameters than these.

    optimizer: returns the optimizer, or None if none is known. parameters: those that are exchanged, by name.
    flatten: puts a tensor of a parameter's shape, given the name, in the order of entries. sums: updates are sums over this
    many ranks; 1 if they are means. simulated: the number of ranks that ask of() for each bucket.
    """

    def __init__(
        self,
        optimizer: Callable[[], torch.optim.Optimizer | None],
        parameters: Mapping[str, torch.nn.Parameter],
        flatten: Callable[[str, Tensor], Tensor],
        sums: Callable[[], int] = lambda: 1,
        simulated: int = 1,
    ):
        self._optimizer, self._parameters, self._flatten, self._sums = optimizer, parameters, flatten, sums
        self._simulated, self._seeds = simulated, dict[str, list[Tensor]]()
        self._ids = {id(parameter) for parameter in parameters.values()}
        self._fitting: tuple[Any, list[int], bool] = (None, [], False)
        self._shown: list[tuple[dict[str, Any], dict[str, float]]] = []
        self.taken = False
        _register_once()
        _every.add(self)

    def of(self, layout: Layout) -> Momentum | None:
        """Take the momentum over for a bucket's layers in this step. None if it is left to the optimizer, or is 0."""
        self.show()
        optimizer = self._optimizer()
        self.taken = optimizer is not None and self._fits(optimizer) and optimizer.param_groups[0]["momentum"] > 0
        if not self.taken:
            return None
        assert optimizer is not None
        share, first = 1 / self._sums(), optimizer.param_groups[0]
        decays = {
            id(each): share * (-group["weight_decay"] if group.get("maximize") else group["weight_decay"])
            for group in optimizer.param_groups
            for each in group["params"]
        }
        own = [self._parameters[name] for name in layout.names]
        weights = [self._flatten(name, each.detach()).float() for name, each in zip(layout.names, own, strict=True)]
        seeds = [self._seed(name, optimizer, share) for name in layout.names]
        return Momentum(first["momentum"], first["nesterov"], tuple(decays[id(each)] for each in own), weights, seeds)

    def hide(self, optimizer: torch.optim.Optimizer) -> None:
        """Hide from an optimizer that is about to step what its updates hold."""
        if self.taken and optimizer is self._optimizer():
            self.show()
            for group in optimizer.param_groups:
                self._shown.append((group, {name: group[name] for name in HIDDEN}))
                group.update(dict.fromkeys(HIDDEN, 0.0))

    def show(self) -> None:
        """Show what hide() has hidden, also after a step that raised an error."""
        for group, values in self._shown:
            group.update({name: value for name, value in values.items() if group[name] == 0.0})
        self._shown.clear()

    def _fits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Decide whether the momentum can be taken over from an optimizer."""
        if not isinstance(optimizer, torch.optim.SGD):
            return False
        groups = optimizer.param_groups
        counts = [len(group["params"]) for group in groups]
        if self._fitting[0] is not optimizer or self._fitting[1] != counts:
            trained = {id(each) for group in groups for each in group["params"] if each.requires_grad}
            self._fitting = optimizer, counts, trained == self._ids
        kinds = {(group["momentum"], group["nesterov"], group["dampening"]) for group in groups}
        return self._fitting[2] and len(kinds) == 1 and groups[0]["dampening"] == 0

    def _seed(self, name: str, optimizer: torch.optim.Optimizer, share: float) -> Tensor | None:
        """Take the momentum that a loaded state of the optimizer has for a parameter.

        None if it is all zeros: hvd.broadcast_optimizer_state() makes such buffers, beside velocities that were loaded.
        """
        buffer = optimizer.state.get(self._parameters[name], {}).pop("momentum_buffer", None)
        if buffer is not None and bool(buffer.any()):
            self._seeds[name] = [share * self._flatten(name, buffer).float()] * self._simulated
        seeds = self._seeds.get(name)
        return seeds.pop() if seeds else None


@functools.cache
def _register_once() -> None:
    optimizers.register_once()  # first, so that the sessions know an optimizer before it is looked for here
    register_optimizer_step_pre_hook(_hide_all)
    register_optimizer_step_post_hook(_show_all)


def _hide_all(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    for each in list(_every):
        each.hide(optimizer)


def _show_all(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    for each in list(_every):
        each.show()
