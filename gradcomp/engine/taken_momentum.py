"""Momentum that the exchange takes over from the optimizer: SGD's, or Adam's moments. The optimizer steps without it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gradcomp.core.compressor import Compressor, Layout
from gradcomp.engine.context import AdamStep, Decays, Momentum, Seeds
from gradcomp.engine.origin import sign_of
from gradcomp.engine.slots import Slots
from gradcomp.engine.update_sample import Holds

# The modules of the steps that the exchange knows. A subclass with a step() of its own does something else.
KNOWN_STEPS = {f"torch.optim.{name}" for name in ("sgd", "adam", "adamw")}
# Settings of SGD that the optimizer must not apply again, since updates hold their effect.
HIDDEN = ("momentum", "weight_decay")
# Settings with which Adam does something else than the exchange.
UNLIKE = ("amsgrad", "differentiable")


class Missed(NamedTuple):
    """The reason why an optimizer's momentum is not taken over, which follows its name, and the remedy.

    is_said: a warning has named both.
    """

    reason: str
    remedy: str
    is_said: bool = False


# The remedies for an optimizer that is unknown, for one that does not train all layers, and for one that trains others, too.
TAKE_KNOWN, TAKE_ONE, TAKE_OWN = (
    "Train with torch's SGD, Adam or AdamW",
    "Pass the list of all optimizers of the model (under Horovod, wrap each)",
    "Give each model inside DDP an optimizer of its own, and parameters outside of DDP another one",
)


class _Loaded(NamedTuple):
    """A parameter's moments from an optimizer's state, and the steps that they have seen if the optimizer counts them.

    sign: of the gradients that they were made of.
    """

    moments: tuple[Tensor, ...]
    steps: int
    sign: int


class LastStep(NamedTuple):
    """The last step, as the next one must know it.

    skipped: the optimizer skipped it. compares: all ranks know the optimizer. successes: by device, 1.0 or 0.0, for an
    optimizer with fused=True, which looks on the device whether it is to skip a step.
    """

    skipped: bool
    compares: bool
    successes: Mapping[torch.device, Tensor]


class TakenMomentum:
    """Base of the kinds of momentum that are taken over. Updates hold its effect, which is hidden from the optimizer's step().

    torch's moments are of the negative gradient where a group has maximize=True. The ranks' are of the gradient.

    Moments of an optimizer's state are copied: each rank gets those of a parameter once, and the optimizer loses them when it
    steps. ranks: the number of ranks that ask for each parameter; more than one in a simulation.

    name, types: of the optimizers. holds: the content of updates. exchanged: its description, with {name} for the optimizer.
    arrays: those of a bucket that stand for the optimizer's, by their names there; the second holds squares.
    """

    name: ClassVar[str]
    types: ClassVar[tuple[type, ...]]
    holds: ClassVar[Holds]
    exchanged: ClassVar[str]
    arrays: ClassVar[Mapping[str, str]]

    def __init__(self, slots: Slots, ranks: int):
        self._slots, self._ranks = {slot.name: slot for slot in slots.slots}, ranks
        self._waiting: dict[str, list[_Loaded]] = {}
        self._copied: dict[str, Any] = {}  # the states of optimizers whose moments were copied, by name of the parameter
        self._decays_of: dict[tuple[str, ...], tuple[Any, list[Any], Decays]] = {}
        self._hidden: list[tuple[Any, Any]] = []

    @property
    def hides(self) -> bool:
        return bool(self._hidden)

    def seeds(self, optimizer: torch.optim.Optimizer, layout: Layout, share: float) -> tuple[Seeds, Sequence[int]]:
        """Return the moments of the optimizer's state that layers continue from, and the steps that each layer's have seen."""
        if not (optimizer.state or any(self._waiting.values())):
            return None, ()
        signs: dict[int, int] = {}
        found = [self._take(optimizer, name, signs) for name in layout.names]
        seeds = [
            None if own is None else tuple((share * own.sign) ** power * each for power, each in enumerate(own.moments, 1))
            for own in found
        ]
        return seeds, [0 if own is None else own.steps for own in found]

    def _take(self, optimizer: torch.optim.Optimizer, name: str, signs: dict[int, int]) -> _Loaded | None:
        """Copy a parameter's moments from the optimizer's state. signs: by parameter, filled when the first one is copied.

        None if there are none, or all are zeros: hvd.broadcast_optimizer_state() makes zeros, beside loaded velocities.
        """
        slot = self._slots[name]
        state = {} if slot.parameter is None else optimizer.state.get(slot.parameter, {})
        if self._copied.get(name) is not optimizer.state and all(state.get(key) is not None for key in self.arrays):
            self._copied[name] = optimizer.state
            if any(bool(state[key].any()) for key in self.arrays):
                moments = tuple(slot.flat(state[key]).float() for key in self.arrays)
                if not signs:
                    signs |= {id(each): sign_of(group) for group in optimizer.param_groups for each in group["params"]}
                loaded = _Loaded(moments, int(state.get("step", 0)), signs[id(slot.parameter)])
                self._waiting[name] = [loaded] * self._ranks
        waiting = self._waiting.get(name)
        return waiting.pop() if waiting else None

    def _decays(self, optimizer: torch.optim.Optimizer, layout: Layout, share: float) -> Decays:
        """Gather the weights that decay within gradients. They are kept as long as nothing but their values changes."""
        groups = optimizer.param_groups
        if not any(group["weight_decay"] and not decays_apart(optimizer, group) for group in groups):
            return {}
        slots = [self._slots[name] for name in layout.names]
        parameters = [slot.parameter for slot in slots if slot.parameter is not None]
        facts = (
            share,
            [(id(each), len(each["params"]), each["weight_decay"], each.get("maximize")) for each in groups],
            [(each.data_ptr(), each.requires_grad) for each in parameters],
        )
        kept = self._decays_of.get(layout.names)
        if kept is not None and kept[0] == facts:
            return kept[2]
        decays: dict[float, tuple[list[int], list[Tensor]]] = {}
        group_of = {id(each): group for group in groups for each in group["params"]}
        for i, (slot, parameter) in enumerate(zip(slots, parameters, strict=True)):
            group = group_of[id(parameter)]
            decay = share * sign_of(group) * group["weight_decay"]
            if decay and parameter.requires_grad and not decays_apart(optimizer, group):
                layers, weights = decays.setdefault(decay, ([], []))
                layers.append(i)
                weights.append(slot.flat(parameter.detach()))
        found = {weight.data_ptr() for _, weights in decays.values() for weight in weights}
        if found <= {pointer for pointer, _ in facts[2]}:  # all are views, and none a copy
            self._decays_of[layout.names] = facts, list(groups), decays  # with the groups, so that their ids stay theirs
        return decays

    def drop_copied(self) -> None:
        """Drop the copied parameters' states of the optimizer: all of each, since Adam makes a state only where it has none."""
        for name, state in self._copied.items():
            state.pop(self._slots[name].parameter, None)
        self._copied.clear()

    def forget_copied(self) -> None:
        """Copy the moments again for the next exchange: the last one was undone, and the optimizer still has them."""
        self._copied.clear()

    def state(
        self, group: Mapping[str, Any], parameter: Tensor, kept: Sequence[Tensor], steps: int, sums: int
    ) -> dict[str, Any]:
        """Make the optimizer's state of a parameter.

        kept: means over the ranks, in the order of arrays. sums: the number of ranks if updates are their sums; otherwise 1.
        """
        moments, factor = zip(self.arrays, kept, strict=True), sums * sign_of(group)
        return {key: (factor**power * mean).to(parameter.dtype) for power, (key, mean) in enumerate(moments, 1)}


class SgdMomentum(TakenMomentum):
    """The momentum of torch.optim.SGD. It and weight decay are hidden within step(); schedulers see them at any other time."""

    name: ClassVar[str] = "SGD"
    types: ClassVar[tuple[type, ...]] = (torch.optim.SGD,)
    holds: ClassVar[Holds] = "velocity"
    exchanged: ClassVar[str] = "{name}'s velocities (momentum taken over)"
    arrays: ClassVar[Mapping[str, str]] = {"momentum_buffer": "velocity"}

    def misfit(self, optimizer: torch.optim.Optimizer) -> Missed | None:
        """Say why the momentum of an optimizer of these types cannot be taken over; None if it can, or if there is none."""
        groups = optimizer.param_groups
        if len({(group["momentum"], group["nesterov"], group["dampening"]) for group in groups}) > 1:
            return Missed("differs in momentum, nesterov or dampening between its groups", "Make these equal in all groups")
        if groups[0]["momentum"] and groups[0]["dampening"]:
            return Missed("has dampening", "Make it with dampening=0")
        return None

    def for_step(self, optimizer: torch.optim.Optimizer, layout: Layout, share: float, before: LastStep) -> Momentum:
        """Take the momentum over for a bucket's layers in this step.

        share: of an update that is a sum over the ranks, each rank's share of a mean; otherwise 1. before: the last step. If
        the optimizer skipped it, the velocity has its weight decay, and no other one is due.
        """
        first, (seeds, _) = optimizer.param_groups[0], self.seeds(optimizer, layout, share)
        decays = {} if before.skipped else self._decays(optimizer, layout, share)
        return Momentum(first["momentum"], first["nesterov"], seeds, decays, before.successes.get(layout.device))

    def share_of_gradients(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the factor by which a residual of velocities moves weights as far, once the optimizer adds momentum."""
        return 1 - float(optimizer.param_groups[0]["momentum"])

    def hide(self, optimizer: torch.optim.Optimizer, pending: bool) -> None:
        """Hide momentum and weight decay from an optimizer that is about to step."""
        for group in optimizer.param_groups:
            self._hidden.append((group, {name: group[name] for name in HIDDEN}))
            group.update(dict.fromkeys(HIDDEN, 0.0))

    def show(self) -> None:
        """Show the hidden settings again, also after a step that raised an error."""
        for group, values in self._hidden:
            group.update({name: value for name, value in values.items() if group[name] == 0.0})
        self._hidden.clear()


class AdamMoments(TakenMomentum):
    """The moments of torch's Adam and AdamW. The exchange steps in their place: weights decay, and directions are added.

    Gradients are hidden from Adam meanwhile.
    """

    name: ClassVar[str] = "Adam"
    types: ClassVar[tuple[type, ...]] = (torch.optim.Adam, torch.optim.AdamW)
    holds: ClassVar[Holds] = "direction"
    exchanged: ClassVar[str] = "{name}'s directions (moments taken over)"
    arrays: ClassVar[Mapping[str, str]] = {"exp_avg": "first", "exp_avg_sq": "second"}

    def misfit(self, optimizer: torch.optim.Optimizer) -> Missed | None:
        """Say why the moments cannot be taken over: one kind of them can, with a weight decay that stays out of them."""
        groups = optimizer.param_groups
        if len({(*map(float, group["betas"]), group["eps"]) for group in groups}) > 1:
            return Missed("differs in betas or eps between its groups", "Make these equal in all groups")
        if not groups[0]["eps"] > 0:
            return Missed("has eps=0", "Make it with eps=1e-8")
        unlike = next((each for each in UNLIKE for group in groups if group.get(each)), None)
        return Missed(f"has {unlike}", f"Make it with {unlike}=False") if unlike else None

    def for_step(self, optimizer: torch.optim.Optimizer, layout: Layout, share: float, before: LastStep) -> AdamStep:
        """Take the moments over. See SgdMomentum.for_step()."""
        group, (seeds, steps) = optimizer.param_groups[0], self.seeds(optimizer, layout, share)
        decays = self._decays(optimizer, layout, share)
        betas = float(group["betas"][0]), float(group["betas"][1])
        return AdamStep(betas, group["eps"], share, seeds, steps, before.skipped, before.compares, decays)

    def state(
        self, group: Mapping[str, Any], parameter: Tensor, kept: Sequence[Tensor], steps: int, sums: int
    ) -> dict[str, Any]:
        on_device = group.get("capturable") or group.get("fused")
        count = torch.tensor(float(steps), device=parameter.device if on_device else "cpu")
        return super().state(group, parameter, kept, steps, sums) | {"step": count}

    def share_of_gradients(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the factor of a residual of directions. It has been dropped."""
        return 1.0

    @torch.no_grad()
    def hide(self, optimizer: torch.optim.Optimizer, pending: bool) -> None:
        """Step, and hide the gradients from the optimizer, which then finds nothing to do.

        pending: there is an update to apply. Horovod, too, steps without one: to make a state that it can broadcast.
        """
        if getattr(optimizer, "found_inf", None) is not None:
            raise RuntimeError(
                "a GradScaler leaves it to an optimizer with fused=True to look for infinities, which gradcomp cannot: it has "
                "taken Adam's moments over, and steps in its place. Make the optimizer with fused=False, or write momentum=0 "
                "into the spec; under auto, loss=low"
            )
        for group in optimizer.param_groups:
            own = [parameter for parameter in group["params"] if parameter.grad is not None]
            grads = [parameter.grad for parameter in own]
            if not own:
                continue
            if pending:
                _descend(own, grads, group, decays_apart(optimizer, group))
            for parameter, grad in zip(own, grads, strict=True):
                self._hidden.append((parameter, grad))
                parameter.grad = None

    def show(self) -> None:
        """Show the gradients again."""
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden.clear()


def decays_apart(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Decide whether a group's weights decay apart from its gradients, as with AdamW, a class of its own before torch 2.7."""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def _descend(own: list[Tensor], directions: list[Tensor], group: Mapping[str, Any], decays: bool) -> None:
    """Decay weights, and move them by directions. A rate on the device, as with capturable=True, is not waited for."""
    on_device = isinstance(group["lr"], Tensor) and group["lr"].is_cuda
    rate = group["lr"] if on_device else float(group["lr"])
    if group["weight_decay"] and decays:
        torch._foreach_mul_(own, 1 - rate * group["weight_decay"])
    signed = -rate * sign_of(group)
    if on_device:
        torch._foreach_add_(own, torch._foreach_mul(directions, signed))
    else:
        torch._foreach_add_(own, directions, alpha=signed)


def check_momentum(compressor: Compressor, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a momentum that would act twice."""
    momentum = compressor.traits.momentum
    if momentum > 0 and any(group.get("momentum", 0) > 0 for group in optimizer.param_groups):
        raise ValueError(
            f"the momentum {momentum} of {compressor} and the optimizer's own would act twice; set one of them to 0"
        )


def steps_as_known(kind: type) -> bool:
    """Decide whether step() of a class is one of torch's. Horovod's optimizer calls that of the class that it was made of."""
    for each in kind.__mro__:
        step = each.__dict__.get("step")
        if step is not None and not (module := inspect.unwrap(step).__module__).startswith("horovod."):
            return module in KNOWN_STEPS
    return False
