"""A model's parameters for the doors: each has a name, and a gradient that is read and written in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Compressor, Layer

# Parameters with their names.
NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


class Slot:
    """One parameter. Its entries are numbered in the order of its memory, so that channels-last costs no copy."""

    def __init__(self, name: str, parameter: torch.nn.Parameter):
        self.name = name
        self.parameter = parameter
        self.layer = Layer(parameter.numel(), parameter.device, parameter.dim())
        self.order = sorted(range(parameter.dim()), key=lambda dim: -parameter.stride()[dim])
        self._row_major = self.order == list(range(parameter.dim()))
        self._copy: Tensor | None = None

    def describe(self) -> str:
        """Describe the properties that must be equal on all ranks."""
        order = [dim for dim in self.order if self.parameter.shape[dim] > 1]
        return f"{self.name} {tuple(self.parameter.shape)} {order} {self.parameter.device.type}"

    @property
    def shape_text(self) -> str:
        """Describe the shape, and the order of memory if it is not row-major."""
        order = [dim for dim in self.order if self.parameter.shape[dim] > 1]
        return f"{tuple(self.parameter.shape)}" + (f" in order {order}" if order != sorted(order) else "")

    def open(self) -> Tensor:
        """Return the gradient as a contiguous array. It is copied if its memory has another order than the parameter's."""
        grad = self.parameter.grad
        assert grad is not None
        if grad.device != self.layer.device:
            raise ValueError(
                f"{self.name!r} was on {self.layer.device}, but its gradient is on {grad.device}; move the model first"
            )
        ordered = grad if self._row_major else grad.permute(self.order)
        self._copy = None if ordered.is_contiguous() else ordered.contiguous()
        return ordered if self._copy is None else self._copy

    def close(self) -> None:
        """Give the copy that open() made, if any, to the parameter as its gradient."""
        if self._copy is not None:
            self.parameter.grad, self._copy = self._reordered(self._copy), None

    def flat(self, shaped: Tensor) -> Tensor:
        """Put a tensor of the parameter's shape in the order of the parameter's memory. It is copied where it must be."""
        return shaped.permute(self.order).reshape(-1)

    def shaped(self, flat: Tensor) -> Tensor:
        """Shape a flat array like the parameter. Its entries are in the order of the parameter's memory."""
        return self._reordered(flat.view([self.parameter.shape[dim] for dim in self.order]))

    def _reordered(self, ordered: Tensor) -> Tensor:
        return ordered.permute([self.order.index(dim) for dim in range(len(self.order))])


class Parameters:
    """All parameters that are trained, in the given order. A tied parameter, which has two names, counts once.

    without_gradient: the parameters that need no gradient at set-up, with their names.
    """

    def __init__(self, named: NamedParameters):
        seen: set[int] = set()
        names: set[str] = set()
        self.slots: list[Slot] = []
        self.without_gradient: list[tuple[str, torch.nn.Parameter]] = []
        for name, parameter in checked(named):
            if name in names:
                raise ValueError(f"named_parameters has two parameters called {name!r}; give each its own name")
            names.add(name)
            if not parameter.requires_grad:
                self.without_gradient.append((name, parameter))
            elif id(parameter) not in seen:
                self.slots.append(Slot(name, parameter))
            seen.add(id(parameter))
        self.layers: Mapping[str, Layer] = {slot.name: slot.layer for slot in self.slots}
        self._by_id = {id(slot.parameter): slot for slot in self.slots}
        self._last = 0

    def slot(self, parameter: Tensor) -> Slot | None:
        """Find the slot of a parameter."""
        return self._by_id.get(id(parameter))

    def of_gradient(self, grad: Tensor) -> Slot | None:
        """Find the slot of a gradient. The search begins on both sides of the last one found."""
        count = len(self.slots)
        for distance in range(1, count + 1):
            for at in ((self._last - distance) % count, (self._last + distance) % count):
                if self.slots[at].parameter.grad is grad:
                    self._last = at
                    return self.slots[at]
        return None

    @property
    def any_sparse(self) -> bool:
        """True if any gradient is sparse."""
        return any(slot.parameter.grad is not None and slot.parameter.grad.is_sparse for slot in self.slots)

    @property
    def types(self) -> set[torch.dtype]:
        """Return the types of the parameters."""
        return {slot.parameter.dtype for slot in self.slots}

    def bytes_in(self, widest: torch.dtype) -> int:
        """Count the bytes of all gradients, each in its own type or in this one if that is narrower."""
        return sum(slot.layer.size * min(slot.parameter.dtype.itemsize, widest.itemsize) for slot in self.slots)

    @property
    def shapes(self) -> dict[str, str]:
        """Describe the shape of every parameter."""
        return {slot.name: slot.shape_text for slot in self.slots}

    def terms(self) -> dict[str, str]:
        """Describe the properties of the model that must be equal on all ranks."""
        size = sum(slot.layer.size for slot in self.slots)
        return {
            "parameter names": f"{len(self.slots)}: " + ", ".join(self.layers),
            "parameter shapes": f"{size} entries: " + ", ".join(slot.describe() for slot in self.slots),
        }


def named_of(optimizer: torch.optim.Optimizer, named: NamedParameters | None) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the optimizer's parameters with their names, by default Horovod's, and named ones that are frozen."""
    check_optimizer(optimizer)
    groups = enumerate(optimizer.param_groups)
    unnamed = [(f"allreduce.noname.{i}.{j}", p) for i, group in groups for j, p in enumerate(group["params"])]
    if named is None:
        return unnamed
    ids = {id(parameter) for _, parameter in unnamed}
    listed = checked(named)
    if not any(id(parameter) in ids for _, parameter in listed):
        raise ValueError("the optimizer has none of named_parameters; pass those of the model that the optimizer trains")
    return [(name, parameter) for name, parameter in listed if id(parameter) in ids or not parameter.requires_grad]


def check_optimizer(optimizer: Any) -> None:
    """Refuse anything but an optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"the optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer, such as torch.optim.SGD(...)"
        )


def checked(named: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """List named parameters. Refuse everything else that users pass for them, and say what to pass."""
    right = "pass model.named_parameters()"
    if isinstance(named, torch.nn.Module):
        raise TypeError(f"named_parameters is the model, a {type(named).__name__}; {right}")
    if isinstance(named, (str, Compressor)):
        raise TypeError(f"named_parameters is the spec {str(named)!r}; {right}, and compression={str(named)!r}")
    if not isinstance(named, Iterable):
        raise TypeError(f"named_parameters is of type {type(named).__name__}; {right}")
    listed = list(named)
    for each in listed:
        if isinstance(each, Tensor):
            raise TypeError(f"named_parameters holds parameters without names; {right} in place of model.parameters()")
        if not (isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) and isinstance(each[1], Tensor)):
            raise TypeError(f"named_parameters holds a {type(each).__name__}, not pairs of name and parameter; {right}")
    if not listed:
        raise ValueError(
            "named_parameters is empty; a generator such as model.named_parameters() can be read only once: call it anew for "
            "each argument"
        )
    return listed
