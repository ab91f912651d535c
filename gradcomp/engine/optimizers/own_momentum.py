"""The momentum of the optimizer, taken over by the exchange: SGD's, or Adam's moments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradcomp.core.compressor import Layout
from gradcomp.engine.bucket import Bucket
from gradcomp.engine.context import AdamStep, Momentum
from gradcomp.engine.optimizers import optimizer_hooks
from gradcomp.engine.optimizers.adam_moments import AdamMoments
from gradcomp.engine.optimizers.check import steps_as_known
from gradcomp.engine.optimizers.delivered_sample import DeliveredSample
from gradcomp.engine.optimizers.loaded_moments import LoadedMoments
from gradcomp.engine.optimizers.sgd_momentum import SgdMomentum

_UNAPPLIED = (
    "an exchange begins although optimizer.step() has not applied the last one's update. With momentum=auto an update holds "
    "the momentum: added to the next gradient, or dropped, it would spoil the training. To accumulate gradients, run all "
    "backward passes but the last within no_sync(), or use Horovod's backward_passes_per_step. If updates are dropped, or if "
    "gradients of several losses meet, write momentum=0 into the spec; under auto, loss=low"
)
_CLOSURE = (
    "step(closure) cannot work with momentum=auto: the closure would exchange gradients within the step. Call the closure "
    "before, and step() without it, or write momentum=0 into the spec; under auto, loss=low"
)
_OTHER_KIND = (
    "{name} steps with updates that were made for {old}. Write momentum=0 into the spec before the kind of optimizer changes: "
    'change("SPEC,momentum=0")'
)
_SETTINGS = (
    "{name} has settings now that momentum=auto leaves to the optimizer: dampening, amsgrad, or several momenta or betas, for "
    'example. {outcome}. Call change("SPEC,momentum=0") between two steps, before such a change: it hands the moments over'
)
_ANEW = "Its moments begin anew, and what waited of Adam's directions is dropped"
_MADE_BEFORE = "But the update that it steps with was made before"
_WITHOUT = (
    "{name} steps without an exchange: its gradients come from no_sync() or from the model without DistributedDataParallel, or "
    "it steps a second time. With momentum=auto the exchange has the momentum: such a step would do without it, or nothing at "
    "all. Let the last backward pass before each step exchange its gradients, outside no_sync(). To train on without "
    'exchanges, call change("SPEC,momentum=0"), or change("auto:loss=low"), on all ranks first'
)
_UNKNOWN = (
    "the loaded state holds an optimizer's moments, but the optimizer is unknown until its first step(), and they would be "
    "lost: pass optimizer= to gradcomp.ddp.attach() or gradcomp.horovod.Compression"
)
_BETWEEN = "{call} came between an exchange and optimizer.step(), which is to apply its update: call it after optimizer.step()"


class OwnMomentum:
    """The momentum of the optimizer that trains some parameters, for specs with momentum=auto.

    The optimizer's groups show the user's values except within step(). A loaded state's moments go over into velocities.

    The momentum is left to the optimizer if that is none of those known here, if it has several momenta, or if it trains other
    parameters than these.

    optimizer: returns the optimizer, or None if none is known. parameters: those that are exchanged, by name.
    flatten: puts a tensor of a parameter's shape, given the name, in the order of entries. sums: updates are sums over this
    many ranks; 1 if they are means. simulated: the number of ranks that ask of() for each bucket. sample: finds changes of
    updates before the optimizer steps; None = updates need not be applied at all, as in a simulation. under_way: an exchange
    has begun and not ended: Horovod's step() ends it, and then calls the optimizer's own. applies: decides whether the
    optimizer steps with updates, and not with gradients of a training beside a simulation. is_told: all ranks knew the
    optimizer before their first exchange.
    """

    turn: ClassVar[int] = 2  # after the checks, by which an optimizer is known

    def __init__(
        self,
        optimizer: Callable[[], torch.optim.Optimizer | None],
        parameters: Mapping[str, torch.nn.Parameter],
        flatten: Callable[[str, Tensor], Tensor],
        sums: Callable[[], int] = lambda: 1,
        simulated: int = 1,
        sample: DeliveredSample | None = None,
        under_way: Callable[[], bool] = lambda: False,
        applies: Callable[[], bool] = lambda: True,
        is_told: Callable[[], bool] = lambda: True,
    ):
        self._under_way, self._applies, self._sample, self._is_told = under_way, applies, sample, is_told
        self._optimizer, self._sums = optimizer, sums
        self._parameters, self._ids = parameters, {id(parameter) for parameter in parameters.values()}
        self._drives = sample is not None  # a simulation may be used beside a training
        self._trained: tuple[Any, list[int], bool] = (None, [], False)
        self._loaded = LoadedMoments(parameters, flatten, simulated)
        self._kinds = (SgdMomentum(self._loaded, parameters, flatten), AdamMoments(self._loaded))
        self._kind: SgdMomentum | AdamMoments | None = None
        self._pending = self._delivered = False  # an update that no step has applied yet; one that holds momentum
        self._failed: Callable[[], bool] = lambda: False  # decides whether the step that delivered it has failed
        self._resumed = False  # moments were loaded, and no optimizer has been known since
        self.left = False  # the moments were here when leave() was called
        optimizer_hooks.add(self)

    @property
    def taken(self) -> bool:
        """True if updates hold the momentum."""
        return self._kind is not None

    def of(self, layout: Layout) -> Momentum | AdamStep | None:
        """Take the momentum over for a bucket's layers in this step. None if it is left to the optimizer, or is 0."""
        self.show()
        if self.update_waits:
            self._delivered = False
            raise RuntimeError(_UNAPPLIED)
        optimizer = self._known()
        self._delivered = self._resumed = self.left = False
        before, self._kind = self._kind, None if optimizer is None else self._kind_of(optimizer)
        if optimizer is None:
            return None
        if self._kind is None:
            if before is not None:
                warnings.warn(_SETTINGS.format(name=type(optimizer).__name__, outcome=_ANEW), stacklevel=2)
            return None
        taken = self._kind.of(optimizer, layout, 1 / self._sums(), skipped=self._pending and self._failed())
        return taken._replace(compares=self._is_told()) if isinstance(taken, AdamStep) else taken

    def describe(self) -> str:
        """Name the optimizer's kind of moments that updates will hold. Ranks with other kinds would exchange other things."""
        optimizer = self._optimizer()
        kind = None if optimizer is None else self._kind_of(optimizer)
        if kind is not None:
            return f"moments of {kind.name}"
        return "without momentum" if self._has_none(optimizer) else "without moments that the exchange takes over"

    @property
    def bears_waiting(self) -> bool:
        """True if updates hold the optimizer's momentum, or if it has none: entries that wait then lose nothing by it."""
        optimizer = self._optimizer()
        return optimizer is not None and (self._kind_of(optimizer) is not None or self._has_none(optimizer))

    def _has_none(self, optimizer: torch.optim.Optimizer | None) -> bool:
        if not isinstance(optimizer, torch.optim.SGD) or not steps_as_known(type(optimizer)):
            return False
        return self._trains_just_these(optimizer) and not any(group["momentum"] for group in optimizer.param_groups)

    def leave(self) -> None:
        """Leave the momentum to the optimizer from now on."""
        self.show()
        self.left |= self._kind is not None or self._resumed
        self._kind, self._pending, self._delivered = None, False, False

    def handed_back(self) -> tuple[str, ...]:
        """List the arrays of a bucket's state that the optimizer gets back where a spec leaves its momentum to it."""
        optimizer = self._known() if self._drives else None
        kind = None if optimizer is None else self._kind_of(optimizer)
        return () if kind is None else tuple(kind.arrays.values())

    def hand_back(self, means: Mapping[str, Mapping[str, Tensor]], steps: int) -> float:
        """Give the optimizer its moments back. Return what updates that wait are multiplied by to become gradients.

        means: over the ranks, by array of handed_back() and by parameter, in the parameters' shapes. steps: those of Adam.
        """
        self.left = self._resumed = False
        optimizer = self._optimizer()
        kind = None if optimizer is None else self._kind_of(optimizer)
        assert optimizer is not None and kind is not None
        group_of = {id(each): group for group in optimizer.param_groups for each in group["params"]}
        for name, parameter in [(name, each) for name, each in self._parameters.items() if each.numel()]:  # others: no bucket
            kept = [means[array][name] for array in kind.arrays.values()]
            optimizer.state[parameter] = kind.state(group_of[id(parameter)], parameter, kept, steps, self._sums())
        return kind.share_of_gradients(optimizer)

    @property
    def update_waits(self) -> bool:
        """True if an update that holds momentum waits for the optimizer's step. This waits for a device if one does."""
        return self._delivered and self._sample is not None and not self._failed()

    def refuse_before_step(self, call: str) -> None:
        """Raise an error if an update waits for the optimizer's step."""
        if self.update_waits:
            raise RuntimeError(_BETWEEN.format(call=call))

    def note_loaded(self, moments: bool) -> None:
        """Note that a state was loaded: no update waits any more. moments: the state has some."""
        self.show()
        self.forget_update()
        self._resumed = moments

    def forget_update(self) -> None:
        """Forget the last step's update: nobody is to apply it."""
        self._pending = self._delivered = False
        if self._sample is not None:
            self._sample.discard()

    def note_delivered(self, buckets: Sequence[Bucket], loss_scale: Tensor | None, failed: Callable[[], bool]) -> None:
        """Note a step's updates, which the buckets' gradients hold.

        failed: decides whether the step has failed, so that nobody may apply it. It may wait for a device.
        """
        self._pending, self._delivered, self._failed = True, self.taken, failed
        if self._sample is not None and self.taken:
            self._sample.keep(buckets, loss_scale)

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Hide from an optimizer that is about to step what its updates hold. Its step may call another one."""
        if self._kind is None or self._kind.hides or optimizer is not self._optimizer() or self._under_way():
            return
        if not self._applies():
            return
        if closure:
            raise RuntimeError(_CLOSURE)
        if self._kind_of(optimizer) is not self._kind:
            text = _SETTINGS if isinstance(optimizer, self._kind.types) else _OTHER_KIND
            raise RuntimeError(text.format(name=type(optimizer).__name__, old=self._kind.name, outcome=_MADE_BEFORE))
        gradients = (each.grad for group in optimizer.param_groups for each in group["params"])
        if not self._pending and any(grad is not None and bool(grad.any()) for grad in gradients):
            raise RuntimeError(_WITHOUT.format(name=type(optimizer).__name__))
        scaled = getattr(optimizer, "found_inf", None) is not None  # fused=True under a GradScaler
        if self._sample is not None and not scaled:
            self._sample.check(self._kind.holds)
        self._drives = True
        self._loaded.clear()
        self._kind.hide(optimizer, self._pending)
        self._pending = self._delivered = False

    def after_step(self) -> None:
        """Show the user's values again."""
        self.show()

    def show(self) -> None:
        """Show what was hidden, also after a step that raised an error."""
        if self._kind is not None:
            self._kind.show()

    def _known(self) -> torch.optim.Optimizer | None:
        """Return the optimizer if it is known. Refuse to go on without it where moments were loaded."""
        optimizer = self._optimizer()
        if optimizer is None and self._resumed:
            raise RuntimeError(_UNKNOWN)
        return optimizer

    def _kind_of(self, optimizer: torch.optim.Optimizer) -> SgdMomentum | AdamMoments | None:
        if not (steps_as_known(type(optimizer)) and self._trains_just_these(optimizer)):
            return None
        return next((kind for kind in self._kinds if kind.fits(optimizer)), None)

    def _trains_just_these(self, optimizer: torch.optim.Optimizer) -> bool:
        """Compare the optimizer's parameters with those that are exchanged. Others may be frozen."""
        counts = [len(group["params"]) for group in optimizer.param_groups]
        if self._trained[0] is not optimizer or self._trained[1] != counts:
            every = {id(each): each for group in optimizer.param_groups for each in group["params"]}
            others = any(each.requires_grad for key, each in every.items() if key not in self._ids)
            self._trained = optimizer, counts, not others and self._ids <= every.keys()
        return self._trained[2]
