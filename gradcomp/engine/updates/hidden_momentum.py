"""The momentum of the user's optimizer, hidden while it steps: the residual of an exchange of updates is its queue.

Momentum is a queue: tau steps after a gradient came, heavy-ball momentum m has delivered the share 1 - m^tau of its effect. A
residual is a second queue behind it, and the two delay a gradient twice. So the optimizer steps without its momentum and with
the whole effect of each gradient at once, and an entry that is sent tau steps after its last send releases that share of its
residual (docs/decisions/updates.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Group = dict[str, Any]


class Momentum(NamedTuple):
    """A momentum, and whether it is Nesterov's."""

    value: float = 0.0
    nesterov: bool = False

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
    """

    setting: str
    buffer: str
    second: str = ""


# Exact classes: a subclass may use a setting of the same name in another way.
RULES: Mapping[type, Rule] = {
    torch.optim.SGD: Rule("momentum", "momentum_buffer"),
    torch.optim.RMSprop: Rule("momentum", "momentum_buffer", second="square_avg"),
    torch.optim.Adam: Rule("betas", "exp_avg", second="exp_avg_sq"),
    torch.optim.AdamW: Rule("betas", "exp_avg", second="exp_avg_sq"),
    torch.optim.NAdam: Rule("betas", "exp_avg", second="exp_avg_sq"),
    torch.optim.RAdam: Rule("betas", "exp_avg", second="exp_avg_sq"),
    torch.optim.Adamax: Rule("betas", "exp_avg", second="exp_inf"),
}


def class_of(optimizer: torch.optim.Optimizer) -> type:
    """Return the class of an optimizer as its user made it: Horovod's has a subclass of its own made for it."""
    kind = type(optimizer)
    return kind.__bases__[0] if hasattr(optimizer, "skip_synchronize") and len(kind.__bases__) == 1 else kind


class HiddenMomentum:
    """The momentum of one optimizer. given: the momentum of the spec, in its place; None: the optimizer's own.

    rule: None for an optimizer whose momentum is not known, or not a number: it keeps it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, given: Momentum | None):
        self._optimizer, self._given = weakref.ref(optimizer), given
        rule = RULES.get(class_of(optimizer))
        if given is not None and given.value == 0:  # momentum=0 leaves it to the optimizer
            rule = None
        if rule is not None and any(isinstance(_value(group, rule), Tensor) for group in optimizer.param_groups):
            rule = None
        self.rule = rule
        self._shown: list[tuple[Group, str, Any]] = []
        self._has_hidden = False

    @property
    def normalizes(self) -> bool:
        """True if an update is as long as any other, whatever the gradient's length: by Adam and its kin."""
        return self.rule is not None and bool(self.rule.second)

    def of(self, group: Group) -> Momentum:
        """Return the momentum of a group that the residual stands for."""
        if self.rule is None:
            return Momentum()
        return self._given or Momentum(float(_value(group, self.rule)), bool(group.get("nesterov", False)))

    def hide(self) -> None:
        """Let the optimizer step without momentum, and with the whole effect of each gradient. Do nothing if it does."""
        optimizer = self._optimizer()
        if self.rule is None or self._shown or optimizer is None:
            return
        self._has_hidden = True
        for group in optimizer.param_groups:
            own, momentum = float(_value(group, self.rule)), self.of(group).value
            if self.rule.setting == "betas":  # a moment is a mean: all of a gradient's effect is that of one step
                self._set(group, "betas", (0.0, group["betas"][1]))
            elif own or momentum:
                whole = (1 - group.get("dampening", 0.0) if own else 1.0) / (1 - momentum)
                self._set(group, "lr", group["lr"] * whole)
                self._set(group, "momentum", 0.0)
                if group.get("nesterov"):
                    self._set(group, "nesterov", False)

    def show(self) -> None:
        """Show the optimizer's own settings again."""
        shown, self._shown = self._shown, []
        for group, name, value in shown:
            group[name] = value

    @torch.no_grad()
    def give_back(self) -> None:
        """Show the settings, also after a step that raised an error, with first moments of 0: the residual has the effect.

        A step without momentum leaves its own gradient in a moment, or none, which RMSprop would miss.
        """
        self.show()
        optimizer, rule = self._optimizer(), self.rule
        if rule is None or optimizer is None or not self._has_hidden:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"] if _value(group, rule) else ():
                state = optimizer.state.get(parameter)
                if not state:
                    continue
                if isinstance(moment := state.get(rule.buffer), Tensor):
                    moment.zero_()
                elif rule.second:
                    state[rule.buffer] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def _set(self, group: Group, name: str, value: Any) -> None:
        self._shown.append((group, name, group[name]))
        group[name] = value

    @torch.no_grad()
    def take_undelivered(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Take what the optimizer's first moments have not delivered yet: parameters, and how far they are to move back.

        A moment is the sum of earlier gradients' effects still to come. It is cleared.
        """
        optimizer, rule = self._optimizer(), self.rule
        if rule is None or optimizer is None:
            return
        for group in optimizer.param_groups:
            momentum = Momentum(float(_value(group, rule)), bool(group.get("nesterov", False)))
            m = momentum.value
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                moment = state.get(rule.buffer)
                if not isinstance(moment, Tensor) or m == 0:
                    continue
                step = moment * (group["lr"] * m * (m if momentum.nesterov else 1.0) / (1 - m))
                if rule.setting == "betas":
                    step = step / _root(state, group, rule)
                moment.zero_()
                yield parameter, step


def _root(state: Mapping[str, Any], group: Group, rule: Rule) -> Tensor:
    """Return what a class by Adam divides its first moment by."""
    second: Tensor = state[rule.second]
    if rule.second == "exp_inf":
        return second.clamp(min=group["eps"])
    steps = torch.as_tensor(state["step"], dtype=torch.float32, device=second.device)
    root: Tensor = (second / (1 - group["betas"][1] ** steps).clamp(min=1e-8)).sqrt() + group["eps"]
    return root


def _value(group: Group, rule: Rule) -> Any:
    value = group.get(rule.setting, 0.0)
    return value[0] if rule.setting == "betas" else value


def decay_of(optimizer: torch.optim.Optimizer, group: Group) -> float:
    """Return the share of a weight that a step takes away beside the gradient's: decoupled weight decay, times the rate."""
    decoupled = class_of(optimizer) is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
    return float(group["lr"]) * float(group.get("weight_decay", 0.0)) if decoupled else 0.0


# Calls a function with every parameter's tensors of an optimizer's state.
OfState = Callable[[Tensor], None]


def floating_state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """List the floating-point tensors of an optimizer's state that have a parameter's shape, in the same order on all ranks."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name in sorted(key for key in state if isinstance(key, str)):
                each = state[name]
                if isinstance(each, Tensor) and each.is_floating_point() and each.shape == parameter.shape and each.numel():
                    yield each
