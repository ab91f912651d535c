"""A model's parameters as the adapters see them: a name, and a gradient read and written where it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gradcomp.core import Compressor, Layer

SPARSE = (
    "sparse gradients, such as those of torch.nn.Embedding(sparse=True), cannot be compressed (sparse_as_dense makes no "
    "difference); use sparse=False, or keep that layer in an optimizer of its own"
)


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
        """Makes what was written the parameter's gradient, where it was written to a copy."""
        if self._apart is not None:
            back = [self.order.index(dim) for dim in range(len(self.order))]
            self.parameter.grad, self._apart = self._apart.permute(back), None


def slots(named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> list[Slot]:
    """A slot for each parameter that is trained, in the given order. A parameter under two names (tied) counts once."""
    seen: set[int] = set()
    names: set[str] = set()
    found = []
    for name, parameter in named_parameters:
        if name in names:
            raise ValueError(f"named_parameters has two parameters called {name!r}")
        names.add(name)
        if parameter.requires_grad and id(parameter) not in seen:
            found.append(Slot(name, parameter))
        seen.add(id(parameter))
    return found


def named_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """The optimizer's parameters by name; without names, under the ones Horovod would give."""
    groups = enumerate(optimizer.param_groups)
    theirs = [(f"allreduce.noname.{i}.{j}", p) for i, group in groups for j, p in enumerate(group["params"])]
    if named_parameters is None:
        return theirs
    ids = {id(parameter) for _, parameter in theirs}
    return [(name, parameter) for name, parameter in named_parameters if id(parameter) in ids]


def check_momentum(compressor: Compressor, optimizer: torch.optim.Optimizer | None) -> str | None:
    """Refuses momentum that would act twice; returns a warning where that cannot be seen."""
    momentum = compressor.local_momentum
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


def rates_of(optimizer: torch.optim.Optimizer, found: Iterable[Slot]) -> Callable[[str], float]:
    """What tells a parameter's learning rate of this moment, by name."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    group_of = {slot.name: groups.get(id(slot.parameter)) for slot in found}

    def rate(name: str) -> float:
        group = group_of[name]
        if group is None:
            raise ValueError(f"the optimizer given to gradcomp does not have the parameter {name!r}")
        return float(group["lr"])

    return rate
