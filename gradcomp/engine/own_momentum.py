"""The momentum of the optimizer, taken over by the exchange: SGD's, or Adam's moments."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradcomp.engine import optimizers
from gradcomp.engine.adam_moments import AdamMoments
from gradcomp.engine.bucket import Bucket
from gradcomp.engine.collector import AdamStep, Momentum
from gradcomp.engine.delivered_sample import DeliveredSample
from gradcomp.engine.loaded_moments import LoadedMoments
from gradcomp.engine.sgd_momentum import SgdMomentum
from gradcomp.protocol import Layout

# Those of all sessions and simulations that live.
_every: weakref.WeakSet[OwnMomentum] = weakref.WeakSet()


class OwnMomentum:
    """The momentum of the optimizer that trains some parameters, for specs with momentum=auto.

    The optimizer's groups show the user's values except within step(). A loaded state's moments go over into velocities.

    The momentum is left to the optimizer if that is none of those known here, if it has several momenta, or if it trains other
    parameters than these.

    optimizer: returns the optimizer, or None if none is known. parameters: those that are exchanged, by name.
    flatten: puts a tensor of a parameter's shape, given the name, in the order of entries. sums: updates are sums over this
    many ranks; 1 if they are means. simulated: the number of ranks that ask of() for each bucket. sample: finds changes of
    updates before the optimizer steps; None = nobody looks for them. under_way: an exchange has begun and not ended: Horovod's
    step() ends it, and then calls the optimizer's own.
    """

    def __init__(
        self,
        optimizer: Callable[[], torch.optim.Optimizer | None],
        parameters: Mapping[str, torch.nn.Parameter],
        flatten: Callable[[str, Tensor], Tensor],
        sums: Callable[[], int] = lambda: 1,
        simulated: int = 1,
        sample: DeliveredSample | None = None,
        under_way: Callable[[], bool] = lambda: False,
    ):
        self._under_way = under_way
        self._sample = sample
        self._optimizer, self._parameters, self._flatten, self._sums = optimizer, parameters, flatten, sums
        self._ids = {id(parameter) for parameter in parameters.values()}
        self._trained: tuple[Any, list[int], bool] = (None, [], False)
        loaded = LoadedMoments(parameters, flatten, simulated)
        self._kinds = (SgdMomentum(loaded), AdamMoments(loaded))
        self._kind: SgdMomentum | AdamMoments | None = None
        _register_once()
        _every.add(self)

    @property
    def taken(self) -> bool:
        """True if updates hold the momentum."""
        return self._kind is not None

    def of(self, layout: Layout) -> Momentum | AdamStep | None:
        """Take the momentum over for a bucket's layers in this step. None if it is left to the optimizer, or is 0."""
        self.show()
        optimizer = self._optimizer()
        if optimizer is None or not self._trains_just_these(optimizer):
            self._kind = None
            return None
        self._kind = next((kind for kind in self._kinds if kind.fits(optimizer)), None)
        if self._kind is None:
            return None
        own = [self._parameters[name] for name in layout.names]
        weights = [(each, self._flatten(name, each.detach()).float()) for name, each in zip(layout.names, own, strict=True)]
        return self._kind.of(optimizer, layout.names, 1 / self._sums(), weights)

    def leave(self) -> None:
        """Leave the momentum to the optimizer from now on."""
        self.show()
        self._kind = None

    def note_delivered(self, buckets: Sequence[Bucket], loss_scale: Tensor | None) -> None:
        """Note a step's updates, which the buckets' gradients hold."""
        if self._sample is not None and self.taken:
            self._sample.keep(buckets, loss_scale)

    def hide(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Hide from an optimizer that is about to step what its updates hold."""
        if self._kind is not None and optimizer is self._optimizer() and not self._under_way():
            if closure and isinstance(self._kind, AdamMoments):
                raise RuntimeError(
                    "step(closure) cannot work with momentum=auto, which steps in Adam's place; call the closure before, and "
                    "step() without it, or set momentum=0 in the spec"
                )
            if self._sample is not None:
                self._sample.check(self._kind.holds)
            self._kind.hide(optimizer)

    def show(self) -> None:
        """Show what hide() has hidden, also after a step that raised an error."""
        if self._kind is not None:
            self._kind.show()

    def _trains_just_these(self, optimizer: torch.optim.Optimizer) -> bool:
        """Compare the optimizer's parameters with those that are exchanged."""
        counts = [len(group["params"]) for group in optimizer.param_groups]
        if self._trained[0] is not optimizer or self._trained[1] != counts:
            every = {id(each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad}
            self._trained = optimizer, counts, every == self._ids
        return self._trained[2]


@functools.cache
def _register_once() -> None:
    optimizers.register_once()  # first, so that the sessions know an optimizer before it is looked for here
    register_optimizer_step_pre_hook(_hide_all)
    register_optimizer_step_post_hook(_show_all)


def _hide_all(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    closure = any(each is not None for each in (*args[1:], options.get("closure")))
    for each in list(_every):
        each.hide(optimizer, closure)


def _show_all(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    for each in list(_every):
        each.show()
