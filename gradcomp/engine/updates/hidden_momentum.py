"""The momentum of the user's optimizer, hidden while it steps: the residual of an exchange of updates is its queue.

Momentum is a queue: tau steps after a gradient came, heavy-ball momentum m has delivered the share 1 - m^tau of its effect. A
residual is a second queue behind it, and the two delay a gradient twice. So the optimizer steps without its momentum and with
the whole effect of each gradient at once, and an entry that is sent tau steps after its last send releases that share of its
residual (docs/decisions/updates.md).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.engine.slots import Slot, local

Group = dict[str, Any]


class Momentum(NamedTuple):
    """A momentum, and whether it is Nesterov's. hides: it stands in place of the optimizer's, which is hidden."""

    value: float = 0.0
    nesterov: bool = False
    hides: bool = True

    def shares(self) -> list[float]:
        """Return the share of an entry's residual that is sent at each age, 256 of them, and those of the newest update.

        Nesterov's form has delivered 1 - m^(tau + 1) of a gradient, and of an older one what is left in the same proportion.
        """
        m = self.value
        newest = [*[m**age * (1 - m) for age in range(255)], 0.0] if self.nesterov else [0.0] * 256
        return [*[1 - m**age for age in range(255)], 1.0, *newest]


class Rule(NamedTuple):
    """The setting of a class that is its momentum.

    buffer: the first moment in its state. second: the second moment, by which its steps are divided; "" if there is none.
    rectifies: steps are shorter as long as the second moment is of few gradients.
    """

    setting: str
    buffer: str
    second: str = ""
    rectifies: bool = False


# Exact classes: a subclass may use a setting of the same name in another way.
RULES: Mapping[type, Rule] = {
    torch.optim.SGD: Rule("momentum", "momentum_buffer"),
    torch.optim.RMSprop: Rule("momentum", "momentum_buffer", second="square_avg"),
    torch.optim.Adam: Rule("betas", "exp_avg", second="exp_avg_sq"),
    torch.optim.AdamW: Rule("betas", "exp_avg", second="exp_avg_sq"),
    torch.optim.NAdam: Rule("betas", "exp_avg", second="exp_avg_sq"),
    torch.optim.RAdam: Rule("betas", "exp_avg", second="exp_avg_sq", rectifies=True),
    torch.optim.Adamax: Rule("betas", "exp_avg", second="exp_inf"),
}


def class_of(optimizer: torch.optim.Optimizer) -> type:
    """Return the class of an optimizer as its user made it: Horovod's has a subclass of its own made for it."""
    kind = type(optimizer)
    return kind.__bases__[0] if hasattr(optimizer, "skip_synchronize") and len(kind.__bases__) == 1 else kind


# What is hidden of each optimizer, by group and setting: the group, the user's value, and the one in its place. Several
# sessions may exchange the layers of one optimizer.
_hidden: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[int, str], tuple[Group, Any, Any]]]
_hidden = weakref.WeakKeyDictionary()
# The mark of a first moment that holds what a step with a hidden momentum has left. It goes along where a program copies the
# moment, hands it to another optimizer, or wraps the model anew. A state's moments are others, and have none.
_SPENT = "_gradcomp_spent"


class HiddenMomentum:
    """The momentum of one optimizer. given: the momentum of the spec, in its place; None: the optimizer's own.

    own: the ids of the session's parameters whose residual can stand for it; exchanged: and of those of other sessions. A group
    that trains any more keeps its momentum. rule: None for an optimizer that keeps it in all groups. divides: by a second
    moment, so that an update is as long as any other, whatever the gradient's length. normalizes: it divides, and its momentum
    is hidden.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        given: Momentum | None,
        own: Collection[int],
        exchanged: Collection[int] = (),
    ):
        self._optimizer, self._given, self._own = weakref.ref(optimizer), given, own
        rule = RULES.get(class_of(optimizer))
        self.divides = rule is not None and bool(rule.second)
        if given is not None and not given.hides:
            rule = None
        if rule is not None and any(isinstance(_value(group, rule), Tensor) for group in optimizer.param_groups):
            rule = None
        self._groups = {id(group) for group in optimizer.param_groups if self._is_whole(group, exchanged)}
        self.rule = rule if self._groups else None
        self.normalizes = self.rule is not None and self.divides
        self._has_hidden = False
        self._marked = 0  # states when moments were last marked
        self._last: dict[int, tuple[Group, Group]] = {}  # the values hidden last, by group, and those in their place

    def _is_whole(self, group: Group, exchanged: Collection[int]) -> bool:
        """Say whether the group trains parameters of the session, and none whose residual cannot stand for a momentum."""
        trained = [id(each) for each in group["params"] if each.requires_grad]
        return any(each in self._own for each in trained) and all(each in self._own or each in exchanged for each in trained)

    def _mark(self, optimizer: torch.optim.Optimizer, spent: bool) -> None:
        """Mark the first moments whose momentum is hidden, or unmark them."""
        assert self.rule is not None
        self._marked = len(optimizer.state) if spent else 0
        for parameter in (each for group in optimizer.param_groups if id(group) in self._groups for each in group["params"]):
            if isinstance(moment := optimizer.state.get(parameter, {}).get(self.rule.buffer), Tensor):
                setattr(moment, _SPENT, spent)

    def of(self, group: Group) -> Momentum:
        """Return the momentum of a group that the residual stands for."""
        if self.rule is None or id(group) not in self._groups:
            return Momentum()
        own = float(_value(group, self.rule))
        return self._given or Momentum(own if own < 1 else 0.0, bool(group.get("nesterov", False)))

    def second_moments(self, slots: Iterable[Slot]) -> list[tuple[Slot, Tensor | None]]:
        """Return layers and their second moments, and a centered RMSprop's means; None where there is none yet."""
        optimizer, rule = self._optimizer(), self.rule
        assert optimizer is not None and rule is not None
        kept: dict[Any, Any] = optimizer.state
        centered = {id(each) for group in optimizer.param_groups if group.get("centered") for each in group["params"]}
        found = []
        for slot in slots:
            names = [rule.second, "grad_avg"] if id(slot.parameter) in centered else [rule.second]
            found += [(slot, kept.get(slot.parameter, {}).get(name)) for name in names]
        return [(slot, local(each) if isinstance(each, Tensor) else None) for slot, each in found]

    def hide(self) -> None:
        """Let the optimizer step without momentum, and with the whole effect of each gradient. Do nothing if it does."""
        optimizer = self._optimizer()
        if self.rule is None or optimizer is None:
            return
        self._has_hidden, self._marked = True, min(self._marked, len(optimizer.state))
        if (hidden := _hidden.get(optimizer)) is None:
            hidden = _hidden[optimizer] = {}
        for group in optimizer.param_groups:
            if id(group) not in self._groups or (id(group), self.rule.setting) in hidden:
                continue
            own = float(_value(group, self.rule))
            momentum = own if self._given is None else self._given.value
            values: Group = {}
            if own >= 1 and self._given is None:  # a sum of all gradients is no queue: it stays
                continue
            if self.rule.setting == "betas":  # a moment is a mean: all of a gradient's effect is that of one step
                values = {"betas": (0.0, group["betas"][1])}
            elif own or momentum:
                whole = (1 - group.get("dampening", 0.0) if own else 1.0) / (1 - momentum)
                values = {"momentum": 0.0, "lr": group["lr"] * whole}
                if group.get("nesterov"):
                    values["nesterov"] = False
            hidden |= {(id(group), name): (group, group[name], value) for name, value in values.items()}
            self._last[id(group)] = {name: group[name] for name in values}, values
            group |= values

    @torch.no_grad()
    def decay_weights(self, exchanged: Collection[int]) -> None:
        """Do what is left of a step without a gradient: weight decay, which all ranks share in. exchanged: ids of parameters.

        Layers that had none in this rank's last pass either, where others had some, are unused, and keep their weights.
        """
        if (optimizer := self._optimizer()) is None:
            return
        has_any = any(each.grad is not None for group in optimizer.param_groups for each in group["params"])
        of_gradients = class_of(optimizer) is torch.optim.SGD
        for group in optimizer.param_groups:
            share = float(group["lr"]) * float(group["weight_decay"]) if of_gradients else decay_of(optimizer, group)
            trained = [each for each in group["params"] if id(each) in exchanged and each.requires_grad]
            used = [each for each in trained if each.grad is not None or not has_any]
            if share and used:
                torch._foreach_mul_(used, 1 - share)

    def show(self) -> None:
        """Show the optimizer's own settings again, of all sessions."""
        if (optimizer := self._optimizer()) is None:
            return
        for (_, name), (group, own, hidden) in _hidden.pop(optimizer, {}).items():
            if group[name] is hidden:
                group[name] = own
            elif name == "lr":  # after a step that raised an error
                group[name] = _scheduled(own, hidden, group[name])
        if self._has_hidden and self._marked != len(optimizer.state):
            self._mark(optimizer, True)

    def forget(self) -> None:
        """Forget what is hidden: the optimizer has loaded other settings, and other moments."""
        if (optimizer := self._optimizer()) is not None:
            _hidden.pop(optimizer, None)
            self._has_hidden, self._marked = False, 0

    @torch.no_grad()
    def give_back(self) -> None:
        """Show the settings, also after a step that raised an error, with first moments of 0: the residual has the effect.

        A step without momentum leaves its own gradient in a moment, or none, which RMSprop would miss.
        """
        self.show()
        optimizer, rule = self._optimizer(), self.rule
        if rule is None or optimizer is None:
            return
        for group in optimizer.param_groups:
            has_hidden = self._has_hidden and id(group) in self._groups
            for parameter in group["params"] if _value(group, rule) else ():
                state = optimizer.state.get(parameter)
                if not state:
                    continue
                if not isinstance(moment := state.get(rule.buffer), Tensor):
                    if rule.second:
                        state[rule.buffer] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                elif has_hidden or getattr(moment, _SPENT, False):  # another session may have hidden it
                    moment.zero_()
        self._has_hidden = False
        self._mark(optimizer, False)

    def show_in(self, saved: Mapping[str, Any], fills: bool) -> None:
        """Do as give_back() in a copy of the optimizer's state, and leave the optimizer as it is: a step may be under way.

        fills: also with moments of 0 where there are none, which a step without momentum does not make.
        """
        optimizer, rule = self._optimizer(), self.rule
        if rule is None or optimizer is None or not (self._has_hidden or fills):
            return
        for group, copied in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            own, hidden = self._last.get(id(group), ({}, {}))
            if any(copied[name] is hidden[name] for name in hidden if name in ("betas", "lr")):  # objects of that step alone
                copied |= own
            if id(group) not in self._groups or not _value(copied, rule):
                continue
            for number, parameter in zip(copied["params"], group["params"], strict=True):
                state = saved["state"].get(number) or {}
                moment, makes = state.get(rule.buffer), bool(state and rule.second) or (fills and parameter.requires_grad)
                if self._has_hidden if isinstance(moment, Tensor) else makes:
                    saved["state"][number] = {**state, rule.buffer: torch.zeros_like(parameter if moment is None else moment)}

    @torch.no_grad()
    def take_undelivered(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Take what the optimizer's first moments have not delivered yet: parameters, and how far they are to move back.

        A moment is the sum of earlier gradients' effects still to come. It is cleared.
        """
        optimizer, rule = self._optimizer(), self.rule
        if rule is None or optimizer is None:
            return
        for group in [each for each in optimizer.param_groups if id(each) in self._groups]:
            momentum = Momentum(float(_value(group, rule)), bool(group.get("nesterov", False)))
            m = momentum.value
            for parameter in [each for each in group["params"] if id(each) in self._own]:
                state = optimizer.state.get(parameter, {})
                moment = state.get(rule.buffer)
                if not isinstance(moment, Tensor) or not 0 < m < 1 or getattr(moment, _SPENT, False):
                    continue
                if not (moment := local(moment)).any():  # as in a state of an exchange of updates: what waits has its ages
                    continue
                step = moment * (group["lr"] * m * (m if momentum.nesterov else 1.0) / (1 - m))
                if rule.setting == "betas":
                    step = step / _root(state, group, rule)
                moment.zero_()
                yield parameter, step


def _scheduled(own: float, hidden: float, now: float) -> float:
    """Return the rate of a schedule that went on from a hidden one: by a factor of it, or to a rate of the schedule's own."""
    if min(own, hidden, now) <= 0:
        return now
    return own * now / hidden if abs(math.log(now / hidden)) < abs(math.log(now / own)) else now


def _root(state: Mapping[str, Any], group: Group, rule: Rule) -> Tensor:
    """Return what a class by Adam divides its first moment by, in the next step."""
    second = local(state[rule.second])
    if rule.second == "exp_inf":
        return second.clamp(min=group["eps"])
    if group.get("amsgrad"):
        second = local(state["max_exp_avg_sq"])
    (first, beta), steps = group["betas"], float(state["step"])
    root: Tensor = (second / max(1 - beta**steps, 1e-8)).sqrt() + group["eps"]
    if "momentum_decay" in group:  # NAdam's own momentum, by which it takes the moment
        root = root / (first * (1 - 0.5 * 0.96 ** ((steps + 1) * group["momentum_decay"])))
    if rule.rectifies:  # L. Liu and others, "On the Variance of the Adaptive Learning Rate and Beyond" (2019), algorithm 2
        most = 2 / (1 - beta) - 1
        length = most - 2 * steps * beta**steps / max(1 - beta**steps, 1e-8)
        if length <= 5:
            return torch.ones_like(root)
        return root / math.sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length))
    return root


def _value(group: Group, rule: Rule) -> Any:
    value = group.get(rule.setting, 0.0)
    return value[0] if rule.setting == "betas" else value


def decay_of(optimizer: torch.optim.Optimizer, group: Group) -> float:
    """Return the share of a weight that a step takes away beside the gradient's: decoupled weight decay, times the rate."""
    decoupled = class_of(optimizer) is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
    return float(group["lr"]) * float(group.get("weight_decay", 0.0)) if decoupled else 0.0


def kept_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List the tensors that an optimizer keeps in its state and its groups, at any depth, in the same order on all ranks."""
    kept: dict[Any, Any] = optimizer.state
    groups = [{name: each for name, each in group.items() if name != "params"} for group in optimizer.param_groups]
    states = [kept.get(each, {}) for group in optimizer.param_groups for each in group["params"]]
    shared = {key: each for key, each in kept.items() if isinstance(key, str)}  # of no parameter
    return [each for each in _tensors([groups, states, shared]) if each.numel()]


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor) and hasattr(own := local(state), "__tensor_flatten__"):  # codes and scales of few bits
        yield from _tensors([getattr(own, name) for name in own.__tensor_flatten__()[0]])
    elif isinstance(state, Tensor):
        yield local(state)
    elif isinstance(state, Mapping):
        for key in sorted(state, key=str):
            yield from _tensors(state[key])
    elif isinstance(state, (list, tuple)):
        for each in state:
            yield from _tensors(each)
