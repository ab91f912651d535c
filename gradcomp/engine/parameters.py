"""A model's parameters as the doors see them: a name, and a gradient read and written where it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from gradcomp.protocol import Compressor, Layer

Named = Iterable[tuple[str, torch.nn.Parameter]]


class Slot:
    """One parameter. Entries are numbered in the order of the parameter's own memory, so that channels-last costs no copy."""

    def __init__(self, name: str, parameter: torch.nn.Parameter):
        self.name = name
        self.parameter = parameter
        self.layer = Layer(parameter.numel(), parameter.device, parameter.dim())
        self.order = sorted(range(parameter.dim()), key=lambda dim: -parameter.stride()[dim])
        self._plain = self.order == list(range(parameter.dim()))
        self._apart: Tensor | None = None

    def describe(self) -> str:
        """What must be the same on all ranks."""
        order = [dim for dim in self.order if self.parameter.shape[dim] > 1]
        return f"{self.name} {tuple(self.parameter.shape)} {order} {self.parameter.device.type}"

    def open(self) -> Tensor:
        """The gradient that is there now, contiguous; one laid out in another order than its parameter is copied."""
        grad = self.parameter.grad
        assert grad is not None
        if grad.device != self.layer.device:
            raise ValueError(
                f"{self.name!r} was on {self.layer.device}, its gradient is on {grad.device}: move the model first"
            )
        inner = grad if self._plain else grad.permute(self.order)
        self._apart = None if inner.is_contiguous() else inner.contiguous()
        return inner if self._apart is None else self._apart

    def close(self) -> None:
        """Hand the gradient back to its parameter, if it was written in a copy."""
        if self._apart is not None:
            self.parameter.grad, self._apart = self._turned(self._apart), None

    def shaped(self, flat: Tensor) -> Tensor:
        """Entries in the order of the parameter's memory, as a tensor of its shape."""
        return self._turned(flat.view([self.parameter.shape[dim] for dim in self.order]))

    def _turned(self, inner: Tensor) -> Tensor:
        return inner.permute([self.order.index(dim) for dim in range(len(self.order))])


class Parameters:
    """All parameters that are trained, in the given order. A parameter under two names (tied) counts once."""

    def __init__(self, named: Named):
        seen: set[int] = set()
        names: set[str] = set()
        self.slots: list[Slot] = []
        for name, parameter in named:
            if name in names:
                raise ValueError(f"named_parameters has two parameters called {name!r}")
            names.add(name)
            if parameter.requires_grad and id(parameter) not in seen:
                self.slots.append(Slot(name, parameter))
            seen.add(id(parameter))
        self.layers: Mapping[str, Layer] = {slot.name: slot.layer for slot in self.slots}
        self._by_id = {id(slot.parameter): slot for slot in self.slots}
        self._next = 0

    def slot(self, parameter: Tensor) -> Slot | None:
        """The slot of a parameter."""
        return self._by_id.get(id(parameter))

    def of_gradient(self, grad: Tensor) -> Slot | None:
        """The slot of a gradient; the search begins behind the one found last, where it nearly always is."""
        for i in range(self._next, self._next + len(self.slots)):
            slot = self.slots[i % len(self.slots)]
            if slot.parameter.grad is grad:
                self._next = i % len(self.slots) + 1
                return slot
        return None

    @property
    def any_sparse(self) -> bool:
        """Whether a sparse gradient is there."""
        return any(slot.parameter.grad is not None and slot.parameter.grad.is_sparse for slot in self.slots)

    def terms(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        size = sum(slot.layer.size for slot in self.slots)
        return {
            "parameter names": f"{len(self.slots)}: " + ", ".join(self.layers),
            "parameter shapes": f"{size} entries: " + ", ".join(slot.describe() for slot in self.slots),
        }


def named_of(optimizer: torch.optim.Optimizer, named: Named | None) -> list[tuple[str, torch.nn.Parameter]]:
    """The optimizer's parameters by name; without names, under the ones Horovod would give."""
    groups = enumerate(optimizer.param_groups)
    theirs = [(f"allreduce.noname.{i}.{j}", p) for i, group in groups for j, p in enumerate(group["params"])]
    if named is None:
        return theirs
    ids = {id(parameter) for _, parameter in theirs}
    return [(name, parameter) for name, parameter in named if id(parameter) in ids]


def check_momentum(compressor: Compressor, optimizer: torch.optim.Optimizer | None) -> str | None:
    """Refuse momentum that would act twice; return a warning where that cannot be seen."""
    momentum = compressor.traits.momentum
    if momentum == 0:
        return None
    if optimizer is None:
        return (
            f"momentum={momentum} is kept by the compressor: the optimizer's own momentum must be 0. "
            "Pass optimizer= to have that checked."
        )
    if any(group.get("momentum", 0) > 0 for group in optimizer.param_groups):
        raise ValueError(
            f"momentum={momentum} in the spec and a momentum in the optimizer would act twice; set one of them to 0"
        )
    return None


def rates_of(optimizer: torch.optim.Optimizer, named: Named) -> Callable[[str], float]:
    """What tells a parameter's learning rate of this moment, by name."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    group_of = {name: groups.get(id(parameter)) for name, parameter in named}

    def rate(name: str) -> float:
        group = group_of[name]
        if group is None:
            raise ValueError(f"optimizer= does not have the parameter {name!r}")
        return float(group["lr"])

    return rate
