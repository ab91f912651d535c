"""Optimizers that an exchange of updates does not suit: refused, or named in a warning before their first exchange."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from gradcomp.engine.slots import local
from gradcomp.engine.updates.hidden_momentum import class_of

_SHARDED = (
    "{name} steps a part of the parameters on each rank, with gradients that must be equal everywhere, and this spec exchanges "
    'updates after the step: take the spec "blocks", which exchanges gradients, or an optimizer that is whole on each rank'
)
_LBFGS = (
    "LBFGS takes its next direction from how its own steps have changed the gradient, and with this spec other ranks move the "
    'weights, too: it would diverge. Take the spec "blocks", which exchanges gradients, or another optimizer'
)
_KEEPS_WEIGHTS = (
    "{name} keeps weights of its own ({key!r} in its state), which each rank moves by its own gradients: they drift apart, and "
    'the training may diverge. Take the spec "blocks", which exchanges gradients, or another optimizer'
)
_GATHERS = (
    "{name} calls {function}() itself: probably each rank steps a part of the parameters, with gradients that must be equal "
    "everywhere. With this spec each rank has its own, and a part learns from one rank's batches alone. Take the spec "
    '"blocks", which exchanges gradients'
)
_ESTIMATES = (
    "{name} estimates its rate from how its own steps agree with the gradients, and with this spec other ranks move the "
    'weights, too: the training may diverge. Take the spec "blocks", which exchanges gradients, or another optimizer'
)

# Functions of torch.distributed by which a rank gives others the weights that it has stepped.
_GATHERING = {"all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_to_all", "all_to_all_single", "broadcast"}


def refuse_unsuited(optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """Refuse an optimizer that would not train."""
    name = class_of(optimizer).__name__
    if name == "LBFGS" and ranks > 1:
        raise RuntimeError(_LBFGS)
    if name == "ZeroRedundancyOptimizer":
        raise RuntimeError(_SHARDED.format(name=name))


def why_unsuited(optimizer: torch.optim.Optimizer) -> str:
    """Return the warning of an optimizer that has stepped, and may not train well; "" for others."""
    if (kind := class_of(optimizer)).__module__.startswith("torch."):
        return ""
    if function := _gathering(kind):
        return _GATHERS.format(name=kind.__name__, function=function)
    if any({"d", "growth_rate"} <= group.keys() for group in optimizer.param_groups):  # D-Adaptation, Prodigy
        return _ESTIMATES.format(name=kind.__name__)
    return _KEEPS_WEIGHTS.format(name=kind.__name__, key=key) if (key := _kept_weights(optimizer)) else ""


def _gathering(kind: type) -> str:
    """Return the name of a gathering function that the methods of a class call; "" if they call none."""
    classes = [each for each in kind.__mro__ if not each.__module__.startswith(("torch.", "builtins"))]
    methods = [inspect.unwrap(each) for of in classes for each in vars(of).values() if inspect.isfunction(each)]
    return next((name for each in methods for name in each.__code__.co_names if name in _GATHERING), "")


@torch.no_grad()
def _kept_weights(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of what an optimizer, not one of torch's, keeps in its state near the weights; "" if there is nothing."""
    sums: dict[str, Tensor] = {}  # of squares: of the distance, and of the weights
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            weights = local(parameter).double()
            for name, each in optimizer.state.get(parameter, {}).items():
                if not isinstance(each, Tensor) or not each.is_floating_point() or each.shape != parameter.shape:
                    continue
                if type(own := local(each)) in (Tensor, torch.nn.Parameter):  # one of few bits may have no arithmetic
                    found = torch.stack([(own - weights).square().sum(), weights.square().sum()])
                    sums[name] = sums[name] + found if name in sums else found
    return next((name for name, found in sums.items() if found[0] < found[1] / 4), "")
