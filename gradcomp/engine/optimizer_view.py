"""The exchange's view of the optimizer that trains its parameters: rates, momentum, checks, and the acts around its steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Compressor, Layout
from gradcomp.core.requests import World
from gradcomp.engine.acting_optimizer import ActingOptimizer, parameters_of
from gradcomp.engine.bucket import Bucket
from gradcomp.engine.context import UNKNOWN, AdamStep, LayerRates, LossScale, Momentum, StepContext
from gradcomp.engine.delivery import Delivery
from gradcomp.engine.optimizer_steps import views_beside, warn_user
from gradcomp.engine.slots import Slots
from gradcomp.engine.stages.stage import Copy
from gradcomp.engine.taken_momentum import (
    TAKE_KNOWN,
    TAKE_ONE,
    TAKE_OWN,
    AdamMoments,
    LastStep,
    Missed,
    SgdMomentum,
    check_momentum,
    steps_as_known,
)
from gradcomp.engine.update_sample import Holds, UpdateSample
from gradcomp.engine.user_clip import UserClip
from gradcomp.native.memory import Memory

_UNAPPLIED = (
    "an exchange begins although optimizer.step() has not applied the last one's update. gradcomp has taken the optimizer's "
    "momentum over, and an update holds it: added to the next gradient, it would spoil the training. gradcomp can undo the "
    "exchange, but not where no optimizer steps at all, as in a loop over the parameters, within "
    "DistributedDataParallel.join(), or in a model on several devices: let only the last backward pass before each step "
    "exchange gradients, or write momentum=0 into the spec; under auto, loss=low. If a guard leaves out all steps, by the norm "
    "that clip_grad_norm_() returns: that is an update's. Let it compare the mean over the ranks of stats()['grad_norm']"
)
_UNTOLD = "; pass optimizer= beside the spec: without it, the steps are shorter than torch's"
_OTHER_KIND = (
    "{name} steps with updates that were made for {old}, and hold its momentum. If {name} calls the step() of another "
    "optimizer, as Lookahead does, let the spec be auto, or write momentum=0 into it: the exchange is then of gradients. If "
    'the kind of optimizer changes in mid-training, call change("SPEC,momentum=0") before'
)
_SETTINGS = (
    "gradcomp had taken {name}'s momentum over, and does not support {name}'s settings now: dampening, amsgrad, or several "
    'momenta or betas, for example. {outcome}. Call change("SPEC,momentum=0") between two steps, before the change: it hands '
    "the moments over"
)
_OTHER_STATE = (
    "the groups of {name} have no {key}: the state of another kind of optimizer was loaded into it. Load the state of "
    "{name}, or make the optimizer anew"
)
_ANEW = "Its moments begin anew, and the residual of Adam's directions is dropped"
_MADE_BEFORE = "But the update that it steps with was made before"
_WITHOUT = (
    "{name} steps without an exchange: no gradients were exchanged since its last step. gradcomp has taken its momentum over, "
    "and the exchange applies it: this step would do without it, or nothing at all. Let the last backward pass before each "
    'step exchange its gradients. To train on without exchanges, call change("SPEC,momentum=0"), or change("auto:loss=low"), '
    "on all ranks first"
)
_BEGINS_WITHOUT = (
    "{name} goes on without the moments that it had: they were not in its state, but in the ranks' own. They begin with zeros "
    "now, and the residuals, too. Save the state_dict() of the handle, or of optimizer.compression, on every rank beside the "
    "model, or before a new DDP around the same layers, and load it with load_state_dict(); or call "
    'change("SPEC,momentum=0") before a checkpoint, or before a new DDP, which gives the optimizer its moments'
)
_IDLE = (
    ". {layer!r} has no gradient: if it is frozen, or unused in some steps, DistributedDataParallel needs "
    "find_unused_parameters=True, or it exchanges nothing"
)
_TAKE_HOOK = "Change them before it, by parameter.register_hook()"
_UNKNOWN = (
    "the loaded state holds an optimizer's moments, but the optimizer is unknown until its first step(), and they would be "
    "lost: pass optimizer= where you pass the spec"
)


class OptimizerView(ActingOptimizer):
    """The exchange's view of an optimizer.

    sums: updates are sums over the ranks, not means. skips_optimizer: no step of the optimizer follows this rank's exchanges,
    and its weights lag behind.
    """

    def __init__(self, slots: Slots, optimizer: torch.optim.Optimizer | None = None, scaler: Any = None, ranks: int = 1):
        """ranks: the number of ranks that share the view, as those of a simulation do."""
        super().__init__(slots, optimizer)
        self._loss_scale = None if scaler is None else LossScale(scaler)
        self.sums = self.skips_optimizer = False
        self._ranks = ranks
        self._rates: tuple[Any, LayerRates] = None, LayerRates({})  # the facts that they follow from, and the last rates
        self._kinds = SgdMomentum(slots, ranks), AdamMoments(slots, ranks)
        self._kind: SgdMomentum | AdamMoments | None = None
        self._sample = UpdateSample(slots.slots)
        self._pending = False  # no step has applied the last update, which holds momentum
        self._may_be_skipped = False  # the optimizer looks on the device whether to apply it
        self._delivery: tuple[Delivery, int] | None = None  # of the last step, and the step's number there
        self._resumed = False  # moments were loaded, and no optimizer has been known since

    # The optimizer's facts.

    @property
    def is_linear(self) -> bool:
        """True if the acting optimizer moves weights by multiples of its updates."""
        return isinstance(self.acting, torch.optim.SGD) and steps_as_known(type(self.acting))

    @property
    def taken(self) -> bool:
        """True if updates hold the momentum."""
        return self._kind is not None

    @property
    def summed(self) -> int:
        """The number of ranks if updates are their sums; otherwise 1."""
        return self._ranks if self.sums else 1

    @property
    def tolerates_delay(self) -> bool:
        """True if a residual loses nothing: the optimizer was given, and its momentum, if any, is taken over."""
        acting = self.acting
        return self.is_told and acting is not None and (self._kind_of(acting) is not None or self._has_no_momentum(acting))

    @property
    def has_no_momentum(self) -> bool:
        """True if the optimizer is SGD without momentum."""
        return self._has_no_momentum(self.acting)

    @property
    def missed(self) -> Missed | None:
        """The reason why the optimizer's momentum is not taken over; None if it is, if there is none, or if it is unknown."""
        for each in dict.fromkeys([*([] if self.acting is None else [self.acting]), *self.in_part]):
            missed = self._missed_of(each)
            if missed is not None and not (missed.remedy in (TAKE_ONE, TAKE_OWN) and _is_plain_sgd(each)):
                return missed._replace(reason=f"{type(each).__name__} {missed.reason}")
        return None

    def exchanges(self, takes_momentum: bool) -> str:
        """Describe what the ranks exchange. takes_momentum: the spec takes the optimizer's momentum over."""
        acting = self.acting
        if not takes_momentum:
            return "gradients"
        if (missed := self.missed) is not None:
            return f"gradients, since {missed.reason}"
        if acting is None:
            return "gradients, since no optimizer is known"
        name, kind = type(acting).__name__, self._kind_of(acting)
        if kind is None:
            return f"gradients, since {name} has no momentum"
        return kind.exchanged.format(name=name) + ("" if self.is_told or kind.holds != "direction" else _UNTOLD)

    @property
    def terms(self) -> dict[str, str]:
        """Describe the optimizer's kind of moments, which must be equal on all ranks: others would exchange other things."""
        acting = self.acting
        kind = None if acting is None else self._kind_of(acting)
        if not self.is_told:
            text = "unknown before its first step"
        elif kind is not None:
            text = f"moments of {kind.name}"
        else:
            text = f"without {'momentum' if self._has_no_momentum(acting) else 'moments that the exchange takes over'}"
        return {"optimizer": text}

    @property
    def generation(self) -> tuple[int, int]:
        """The generation of the optimizer's state (Origin)."""
        return self.origin.generation

    @property
    def parts(self) -> Sequence[OptimizerView]:
        """The views of single optimizers that this view consists of."""
        return (self,)

    def part_of(self, name: str) -> int:
        """Return the number of the part that has a layer."""
        return 0

    def rates(self) -> LayerRates | None:
        """Return the current learning rates by layer; None where no optimizer is known.

        The rate is UNKNOWN for a parameter that the optimizer does not have, and where it lies on a device, for which the host
        would have to wait.
        """
        if (acting := self.acting) is None:
            return None
        groups = acting.param_groups
        given = [group["lr"] for group in groups]
        known = [UNKNOWN if isinstance(each, Tensor) and each.is_cuda else float(each) for each in given]
        facts = weakref.ref(acting), known, [len(group["params"]) for group in groups]
        if self._rates[0] != facts:
            rate_of = {id(each): rate for group, rate in zip(groups, known, strict=True) for each in group["params"]}
            own = {name: rate_of.get(id(each), UNKNOWN) for name, each in self.slots.parameters.items()}
            self._rates = facts, LayerRates(own)
        return self._rates[1]

    def check_momentum(self, compressor: Compressor) -> None:
        """Refuse a compressor whose momentum would act twice."""
        if self.optimizer is not None:
            check_momentum(compressor, self.optimizer)

    # A step of the exchange.

    def context(
        self, layouts: Sequence[Layout], memory: Memory, world: World, uses_rates: bool, takes_momentum: bool
    ) -> StepContext:
        """Make the context of a step. layouts: of its buckets. takes_momentum: all buckets apply the optimizer's."""
        self._ranks, momenta = world.size, self._momenta(layouts, world.size) if takes_momentum else {}
        self.origin.compare(self.acting)
        rates = self.rates() if uses_rates else None
        scales = {} if self._loss_scale is None else {device: self.loss_scale_on(device) for _, _, device in layouts}
        follows = frozenset([each.names[0] for each in layouts] if rates is not None and (momenta or self.is_linear) else ())
        frozen = frozenset([name for name, each in self.slots.parameters.items() if not each.requires_grad])
        return StepContext(memory, world, rates, follows, frozen, momenta, scales, self.generation)

    def loss_scale_on(self, device: torch.device) -> Tensor | None:
        """Return the loss scale as one float on a device; None if the loss is not scaled."""
        return None if self._loss_scale is None else self._loss_scale.on(device)

    def _momenta(self, layouts: Sequence[Layout], ranks: int) -> dict[str, Momentum | AdamStep]:
        """Take the momentum over for a step's buckets. Return nothing if it is left to the optimizer, or is 0."""
        self.show()
        if self.update_waits:
            self._pending = False
            raise RuntimeError(_UNAPPLIED)
        optimizer, before, resumed, self._resumed = self._known_optimizer(), self._kind, self._resumed, False
        self._kind = kind = None if optimizer is None else self._kind_of(optimizer)
        if optimizer is None or kind is None:
            if self._sample.are_changed:
                self.origin.leave()
            elif optimizer is not None and before is not None:
                warn_user(_SETTINGS.format(name=type(optimizer).__name__, outcome=_ANEW))
            return {}
        successes = self._delivery[0].successes(self._delivery[1]) if self._may_be_skipped and self._delivery else {}
        share, last = 1 / (ranks if self.sums else 1), LastStep(self._pending and self._has_failed(), self.is_told, successes)
        momenta = {each.names[0]: kind.for_step(optimizer, each, share, last) for each in layouts}
        has_some = any(seed is not None for momentum in momenta.values() for seed in momentum.seeds or ())
        self.origin.note_moments(optimizer, resumed, has_some)
        return momenta

    def note_delivered(self, buckets: Sequence[Bucket], delivery: Delivery, step: int) -> None:
        """Note a step's updates, in the buckets' gradients. delivery: decides whether the step of this number has failed."""
        self._pending, self._may_be_skipped, self._delivery = self.taken, False, (delivery, step)
        self._sample.note_delivered(buckets)

    def _has_failed(self) -> bool:
        """Decide whether the last step has failed. This waits for a device if there is one."""
        return self._delivery is not None and self._delivery[0].has_failed(self._delivery[1])

    # Between two steps.

    @property
    def update_waits(self) -> bool:
        """True if an update that holds momentum waits for the optimizer's step. This waits for a device if there is one."""
        return self._pending and not self._has_failed()

    def forget_update(self) -> None:
        """Forget the last step's update: no step of the optimizer is to apply it."""
        self._pending = False
        self._sample.discard()

    def take_back_update(self, stays: bool) -> None:
        """Forget the last update: its exchange is undone. stays: in the gradients, where a change of it is refused."""
        if stays and self._kind is not None and not self._sample.is_scaled:
            self._sample.check(self._kind.holds)
        self.forget_update()
        for kind in self._kinds:
            kind.forget_copied()

    def note_loaded(self, moments: bool) -> None:
        """Note that a state was loaded. moments: the state has some."""
        self.show()
        self.origin.forget()
        self._resumed = moments

    def leave(self) -> None:
        """Leave the momentum to the optimizer from now on."""
        self.show()
        self._kind, self._pending = None, False
        self.origin.leave()

    def arrays_to_hand_back(self) -> tuple[str, ...]:
        """List the arrays of a bucket that the optimizer gets back where a spec leaves its momentum to it."""
        optimizer = self._known_optimizer()
        kind = None if optimizer is None else self._kind_of(optimizer)
        return () if kind is None else tuple(kind.arrays.values())

    def hand_back(self, means: Mapping[str, Mapping[str, Tensor]], steps: Mapping[str, int], ranks: int) -> dict[str, float]:
        """Give the optimizer its moments back. Return the factors, by layer, that make the residual one of gradients.

        means: over the ranks, by array and by layer, flat. steps: those of Adam, by layer.
        """
        self._resumed, optimizer = False, self.acting
        kind = None if optimizer is None else self._kind_of(optimizer)
        assert optimizer is not None and kind is not None
        group_of = {id(each): group for group in optimizer.param_groups for each in group["params"]}
        for slot in self.slots.slots:
            if slot.parameter is not None and slot.layer.size:  # others have no bucket
                kept = [slot.shaped(means[array][slot.name]).clone() for array in kind.arrays.values()]
                group = group_of[id(slot.parameter)]
                own = kind.state(group, slot.parameter, kept, steps[slot.name], ranks if self.sums else 1)
                optimizer.state[slot.parameter] = own
        return dict.fromkeys(self.slots.layers, kind.share_of_gradients(optimizer))

    # A step of the optimizer.

    def steps_at_once(self, optimizer: torch.optim.Optimizer) -> bool:
        """Decide whether a step() calls no other one. Horovod's synchronizes, and calls another one.

        hvd.broadcast_optimizer_state() calls that one alone: without an update, and with gradients of zeros.
        """
        if not hasattr(optimizer, "synchronize"):
            return True
        return optimizer is self.acting and self.taken and not self._pending and not _has_gradients(optimizer)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Hide the settings that the updates hold from an optimizer that is about to step. Its step may call another one."""
        kind = self._kind
        if optimizer is not self.acting or (kind is not None and kind.hides):
            return
        if kind is None:
            self._note_origin(optimizer)
            self._undo_clip(optimizer, "gradient")
            return
        if self._kind_of(optimizer) is not kind:
            text = _SETTINGS if isinstance(optimizer, kind.types) else _OTHER_KIND
            raise RuntimeError(text.format(name=type(optimizer).__name__, old=kind.name, outcome=_MADE_BEFORE))
        self._note_origin(optimizer)
        self.origin.broadcasts = hasattr(optimizer, "synchronize") and not self._pending
        if not self._pending and _has_gradients(optimizer):
            idle = next((name for name, each in self.slots.parameters.items() if each.grad is None), None)
            why = "" if idle is None else _IDLE.format(layer=idle)
            raise RuntimeError(_WITHOUT.format(name=type(optimizer).__name__) + why)
        self._may_be_skipped = getattr(optimizer, "found_inf", None) is not None  # of fused=True under a GradScaler
        self._undo_clip(optimizer, kind.holds)
        kind.drop_copied()
        kind.hide(optimizer, self._pending)
        self._pending = False

    # The user's clip of updates.

    def save_clips(self, copy: Copy | None = None) -> list[dict[str, Any]]:
        """Copy what is known of the user's clips, by part. copy: copies this rank's own figures; None leaves them out."""
        return [part._sample.save(copy) for part in self.parts]

    def load_clips(self, state: Sequence[Any]) -> Callable[[], None]:
        """Check what save_clips() copied. Return a function that loads it, and cannot fail. Nothing: clips are forgotten."""
        of_parts = state if len(state) == len(self.parts) else [{}] * len(self.parts)
        loads = [part._sample.load(own) for part, own in zip(self.parts, of_parts, strict=True)]

        def load() -> None:
            for each in loads:
                each()

        return load

    @property
    def clips(self) -> bool:
        """True if each rank's own gradients are cut, since the user clips updates."""
        return bool(self._sample.clips.bounded)

    @property
    def looks_for_clip(self) -> bool:
        """True if a step is to measure the gradients' norm, for a clip that may come."""
        return not self.clips and self._sample.watches

    def bounds(self) -> Sequence[tuple[UserClip, Collection[str]]]:
        """Return the clips of the user's to a norm, each with the names of its layers."""
        return self._sample.bounds()

    def _undo_clip(self, optimizer: torch.optim.Optimizer, holds: Holds) -> None:
        if getattr(optimizer, "grad_scale", None) is None:  # of fused=True: otherwise the gradients have the loss scale
            momentum = optimizer.param_groups[0].get("momentum", 0.0)
            self._sample.settle(
                holds, self.summed, momentum, lambda: [part._sample for view in views_beside(self) for part in view.parts]
            )

    def _note_origin(self, optimizer: torch.optim.Optimizer) -> None:
        self.origin.note_step(optimizer, self._pending)
        if self.origin.begins_without:
            self.origin.begins_without = False
            warn_user(_BEGINS_WITHOUT.format(name=type(optimizer).__name__))

    def show(self) -> None:
        """Show the hidden settings again, also after a step that raised an error."""
        if self._kind is not None:
            self._kind.show()

    def _known_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer if it is known. Refuse to go on without it where moments were loaded."""
        if (acting := self.acting) is None and self._resumed:
            raise RuntimeError(_UNKNOWN)
        return acting

    def _kind_of(self, optimizer: torch.optim.Optimizer) -> SgdMomentum | AdamMoments | None:
        """Return the kind of momentum to take over; None if there is none, or if it is missed."""
        if self._missed_of(optimizer) is not None or self._has_no_momentum(optimizer):
            return None
        return next(kind for kind in self._kinds if isinstance(optimizer, kind.types))

    def _missed_of(self, optimizer: torch.optim.Optimizer) -> Missed | None:
        """Say why an optimizer's momentum is not taken over; None if it is, or if there is none."""
        kind = next((kind for kind in self._kinds if isinstance(optimizer, kind.types)), None)
        if kind is None:
            return Missed("is unknown to the exchange", TAKE_KNOWN)
        if not steps_as_known(type(optimizer)):
            return Missed("has a step() of its own", TAKE_KNOWN)
        if self._sample.are_changed:
            return Missed("steps with gradients that are changed after their exchange", _TAKE_HOOK, is_said=True)
        has_all, has_others = self._compare(optimizer)
        if has_others:
            return Missed("trains parameters that are not exchanged here", TAKE_OWN)
        if not has_all:
            return Missed("does not train all layers that are exchanged", TAKE_ONE)
        try:
            return kind.misfit(optimizer)
        except KeyError as error:
            raise RuntimeError(_OTHER_STATE.format(name=type(optimizer).__name__, key=error)) from error

    def _has_no_momentum(self, optimizer: torch.optim.Optimizer | None) -> bool:
        return optimizer is not None and _is_plain_sgd(optimizer) and self._trains_just_these(optimizer)


class FixedRates(OptimizerView):
    """A view without an optimizer: all layers have the same learning rate."""

    def __init__(self, slots: Slots, rate: float):
        super().__init__(slots)
        self._fixed = LayerRates(dict.fromkeys(slots.layers, rate))

    def rates(self) -> LayerRates:
        return self._fixed


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Decide whether an optimizer has gradients that are not zeros. This waits for a device if there is one."""
    return any(each.grad is not None and bool(each.grad.any()) for each in parameters_of(optimizer))


def _is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Decide whether an optimizer is SGD without momentum."""
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    return is_sgd and not any(group["momentum"] for group in optimizer.param_groups) and steps_as_known(type(optimizer))
