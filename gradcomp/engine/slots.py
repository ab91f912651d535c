"""Slots: the places of a model that an exchange reads gradients from and writes updates to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Compressor, Layer
from gradcomp.native import extension

# Parameters with their names.
NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]

_COMPLEX = (
    "the parameter {name!r} is {form}; gradcomp takes real ones: keep torch.view_as_real() of it as the parameter, and call "
    "torch.view_as_complex() in forward()"
)


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor; of another tensor all."""
    if not hasattr(tensor, "to_local"):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[no-any-return]


class Slot:
    """A layer's place in a model: an exchange reads its gradient here, or gets it handed in, and writes its update here.

    name, layer: of the parameter. shape: of its gradient. parameter: the parameter itself, if there is one. update: the flat
    array for the update; None: the gradient becomes the update.
    """

    update: Tensor | None = None

    def __init__(self, name: str, shape: Sequence[int], device: torch.device, parameter: torch.nn.Parameter | None = None):
        self.name, self.shape, self.parameter = name, torch.Size(shape), parameter
        self.layer = Layer(self.shape.numel(), extension.numbered(device), len(self.shape))

    def read(self) -> Tensor:
        """Return the gradient as a contiguous array."""
        raise NotImplementedError(f"the gradient of {self.name!r} is handed in")

    def describe(self) -> str:
        """Describe the properties that must be equal on all ranks."""
        return f"{self.name} {self.shape_text} {self.layer.device.type}"

    @property
    def shape_text(self) -> str:
        """Describe the shape, and the order of memory if it is not row-major."""
        return f"{tuple(self.shape)}"

    def flat(self, shaped: Tensor) -> Tensor:
        """Put a tensor of the parameter's shape in the order of entries. It is copied where it must be."""
        return shaped.reshape(-1)

    def shaped(self, flat: Tensor) -> Tensor:
        """Shape a flat array like the parameter."""
        return flat.view(self.shape)


class ParameterSlot(Slot):
    """The slot of a parameter's gradient. Entries are numbered in the order of its memory: channels-last costs no copy.

    order: of the dimensions in memory. copy: of the gradient, whose memory has another order.
    """

    parameter: torch.nn.Parameter

    def __init__(self, name: str, parameter: torch.nn.Parameter):
        super().__init__(name, parameter.shape, parameter.device, parameter)
        self.order = sorted(range(parameter.dim()), key=lambda dim: -parameter.stride()[dim])
        self.is_row_major = self.order == list(range(parameter.dim()))
        self.copy: Tensor | None = None

    @property
    def shape_text(self) -> str:
        order = [dim for dim in self.order if self.shape[dim] > 1]
        return super().shape_text + (f" in order {order}" if order != sorted(order) else "")

    def read(self) -> Tensor:
        """Return the gradient as a contiguous array. It is copied if its memory has another order than the parameter's."""
        grad = self.parameter.grad
        assert grad is not None
        if grad.device != self.layer.device:
            raise ValueError(
                f"{self.name!r} was on {self.layer.device}, but its gradient is on {grad.device}; move the model first"
            )
        ordered = grad if self.is_row_major else grad.permute(self.order)
        self.copy = None if ordered.is_contiguous() else ordered.contiguous()
        return ordered if self.copy is None else self.copy

    def close(self) -> None:
        """Give the copy that read() made, if any, to the parameter as its gradient."""
        if self.copy is not None:
            self.parameter.grad, self.copy = self._reordered(self.copy), None

    def flat(self, shaped: Tensor) -> Tensor:
        return (shaped if self.is_row_major else shaped.permute(self.order)).reshape(-1)

    def shaped(self, flat: Tensor) -> Tensor:
        return self._reordered(flat.view([self.shape[dim] for dim in self.order]))

    def _reordered(self, ordered: Tensor) -> Tensor:
        return ordered.permute([self.order.index(dim) for dim in range(len(self.order))])


class Slots:
    """The slots of a model, in order.

    without_gradient: the parameters that need no gradient at set-up, with their names. are_first: of the ranks that have
    different shards, this one has the first. by_id: the slots by the parameters' id(). entries: of the whole model.
    """

    slots: Sequence[Slot]
    are_first = True
    are_read = False  # read() may have copied gradients, since their memory has another order than the parameter's

    def __init__(self, slots: Sequence[Slot], without_gradient: Sequence[tuple[str, torch.nn.Parameter]] = ()):
        self.slots, self.without_gradient = slots, without_gradient
        self.layers: Mapping[str, Layer] = {slot.name: slot.layer for slot in slots}
        self.parameters = {slot.name: slot.parameter for slot in slots if slot.parameter is not None}
        self.by_id = {id(slot.parameter): slot for slot in slots if slot.parameter is not None}
        self.entries = sum(slot.layer.size for slot in slots)

    def slot(self, parameter: Tensor) -> Slot | None:
        """Find the slot of a parameter."""
        return self.by_id.get(id(parameter))

    def close(self) -> None:
        """Give the parameters the copies of their gradients that were read."""

    def renew(self) -> bool:
        """Take other parameters that the model has got. Return whether there are any."""
        return False

    @property
    def types(self) -> set[torch.dtype]:
        """Return the types of the parameters."""
        return {parameter.dtype for parameter in self.parameters.values()}

    def bytes_in(self, widest: torch.dtype) -> int:
        """Count the bytes of all gradients, each in its own type or in this one if that is narrower."""
        return sum(each.numel() * min(each.dtype.itemsize, widest.itemsize) for each in self.parameters.values())

    @property
    def shapes(self) -> dict[str, str]:
        """Describe the shape of every parameter."""
        return {slot.name: slot.shape_text for slot in self.slots}

    def terms(self) -> dict[str, str]:
        """Describe the properties of the model that must be equal on all ranks."""
        return {
            "parameter names": f"{len(self.slots)}: " + ", ".join(self.layers),
            "parameter shapes": f"{self.entries} entries: " + ", ".join(slot.describe() for slot in self.slots),
        }


class Parameters(Slots):
    """The slots of all parameters that are trained. A tied parameter, which has two names, counts once."""

    slots: Sequence[ParameterSlot]

    def __init__(self, named: NamedParameters):
        seen: set[int] = set()
        names: set[str] = set()
        slots: list[ParameterSlot] = []
        without_gradient: list[tuple[str, torch.nn.Parameter]] = []
        for name, parameter in checked(named):
            if name in names:
                raise ValueError(f"named_parameters has two parameters called {name!r}; give each its own name")
            names.add(name)
            if not parameter.requires_grad:
                without_gradient.append((name, parameter))
            elif parameter.is_complex():  # DDP hands in its gradient as twice as many real entries
                raise TypeError(_COMPLEX.format(name=name, form=parameter.dtype))
            elif id(parameter) not in seen:
                slots.append(ParameterSlot(name, parameter))
            seen.add(id(parameter))
        super().__init__(slots, without_gradient)
        self.last = 0  # the number of the slot that was found last

    def close(self) -> None:
        self.are_read = False
        for slot in self.slots:
            if slot.copy is not None:
                slot.close()

    def of_gradient(self, grad: Tensor) -> ParameterSlot | None:
        """Find the slot of a gradient. The search begins on both sides of the last one found."""
        count = len(self.slots)
        for distance in range(1, count + 1):
            for at in ((self.last - distance) % count, (self.last + distance) % count):
                if self.slots[at].parameter.grad is grad:
                    self.last = at
                    return self.slots[at]
        return None

    @property
    def any_sparse(self) -> bool:
        """True if any gradient is sparse."""
        return any(slot.parameter.grad is not None and slot.parameter.grad.is_sparse for slot in self.slots)


def named_of(optimizer: torch.optim.Optimizer, named: NamedParameters | None) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the optimizer's parameters with their names, by default numbers in its groups, and named ones that are frozen."""
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
    """List named parameters. Refuse everything else, with an error that names the right argument."""
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
            "named_parameters is empty; a generator such as model.named_parameters() can be read only once: call it again for "
            "each argument"
        )
    return listed
