"""Checks of saved states. Each returns a value of a state, or raises a ValueError that names it."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# No count of a training is larger. Kernels add to steps, as 64-bit integers.
MOST = 2**53

REMEDY = "the state is damaged; load another one"


@contextmanager
def reading() -> Iterator[None]:
    """Refuse a state in which no check has found the damage that its reader stumbles over."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"{REMEDY} ({type(error).__name__}: {reprlib.repr(str(error))})") from error


def shown(value: Any) -> str:
    """Return the text of a number or a name for a message, not too long; of anything else, what it is."""
    return reprlib.repr(value) if isinstance(value, (str, numbers.Number)) or value is None else f"a {type(value).__name__}"


def entry(saved: Any, name: str) -> Any:
    """Return an entry of a dict."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"the state has a {type(saved).__name__} where a dict with {name!r} was expected: {REMEDY}")
    if name not in saved:
        raise ValueError(f"the state has no {name!r}: {REMEDY}")
    return saved[name]


def table(saved: Any, name: str) -> Mapping[str, Any]:
    """Return an entry that is a dict."""
    value = entry(saved, name)
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is a {type(value).__name__} in the state, not a dict: {REMEDY}")
    return value


def table_or_empty(saved: Any, name: str) -> Mapping[str, Any]:
    """Return an entry that is a dict. It may be missing: torch.distributed.checkpoint drops empty dicts."""
    return table(saved, name) if not isinstance(saved, Mapping) or name in saved else {}


def sequence(saved: Any, name: str, counts: Sequence[int] = ()) -> list[Any]:
    """Return an entry that is a list or a tuple, with one of these numbers of values if any are given."""
    value = entry(saved, name)
    if isinstance(value, (str, Tensor)) or not isinstance(value, Sequence):
        raise ValueError(f"{name} is a {type(value).__name__} in the state, not a list: {REMEDY}")
    if counts and len(value) not in counts:
        raise ValueError(f"{name} has {len(value)} values in the state, not {counts[0]} to {counts[-1]}: {REMEDY}")
    return list(value)


def names(saved: Any, name: str) -> list[str]:
    """Return an entry that is a list of names."""
    values = sequence(saved, name)
    if others := [value for value in values if not isinstance(value, str)]:
        raise ValueError(f"{name} has {shown(others[0])} in the state, which is no name: {REMEDY}")
    return values


def read_bool(saved: Any, name: str) -> bool:
    """Return an entry that is True or False."""
    if not isinstance(value := entry(saved, name), bool):
        raise ValueError(f"{name}={shown(value)} in the state must be True or False: {REMEDY}")
    return value


def read_int(saved: Any, name: str, least: int = 0, most: int = MOST) -> int:
    """Return an entry that is a whole number in this range."""
    return check_int(entry(saved, name), name, least, most)


def read_ints(saved: Any, name: str, counts: Sequence[int] = ()) -> list[int]:
    """Return an entry that is a list of whole numbers of at least 0. counts: see sequence()."""
    return [check_int(value, name) for value in sequence(saved, name, counts)]


def check_int(value: Any, name: str, least: int = 0, most: int = MOST) -> int:
    """Return a whole number in this range."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
        above = f" and at most {most}" if most < MOST or (isinstance(value, numbers.Integral) and int(value) > most) else ""
        raise ValueError(f"{name}={shown(value)} in the state must be a whole number of at least {least}{above}: {REMEDY}")
    return int(value)


def number(saved: Any, name: str, least: float = 0.0) -> float:
    """Return an entry that is a finite number of at least this."""
    value = entry(saved, name)
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not least <= float(value) < math.inf:
        raise ValueError(f"{name}={shown(value)} in the state must be a number of at least {least:g}: {REMEDY}")
    return float(value)


def numbers_of(saved: Any, name: str, count: int) -> tuple[float, ...]:
    """Return an entry that is a list of this many finite numbers of at least 0."""
    return tuple(number({name: value}, name) for value in sequence(saved, name, [count]))


def tensor(
    saved: Any, name: str, shape: Sequence[int], *, dtype: torch.dtype | None = None, finite: bool = True, what: str = ""
) -> Tensor:
    """Return an entry that is a tensor of this shape, and of this type if one is given, without its history of gradients.

    what: the tensor's name in messages; the entry's name by default.
    """
    value, what = entry(saved, name), what or name
    if not isinstance(value, Tensor):
        raise ValueError(f"{what} is a {type(value).__name__} in the state, not a tensor: {REMEDY}")
    if value.layout != torch.strided or value.is_meta or hasattr(value, "to_local"):
        raise ValueError(f"{what} is sparse, a DTensor or without memory in the state, not a dense tensor: {REMEDY}")
    if dtype is not None and value.dtype != dtype:
        raise ValueError(f"{what} is of type {value.dtype} in the state where {dtype} was expected: {REMEDY}")
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{what} has shape {tuple(value.shape)} in the state where {tuple(shape)} was expected: {REMEDY}")
    if finite and not bool(is_finite(value).all()):
        raise ValueError(f"{what} is not finite in the state: {REMEDY}")
    return value.detach()


def is_finite(value: Tensor) -> Tensor:
    """Say which entries are finite. torch does not know it of floating-point numbers in 8 bits."""
    return torch.isfinite(value.float() if value.is_floating_point() and value.dtype.itemsize == 1 else value)


def form(value: Any) -> Any:
    """Describe a value to be saved: the names, types and shapes in it."""
    if isinstance(value, Mapping):
        return {str(name): form(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [form(each) for each in value]
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_form(value: Any, expected: Any, what: str) -> None:
    """Refuse what has another form than it was saved with, and what is not finite."""
    if form(value) != expected:
        raise ValueError(f"{what} is not of the form with which it was saved: {REMEDY}")
    if isinstance(value, Mapping):
        for name, each in value.items():
            check_form(each, expected[str(name)], f"{what}, {name}")
    elif isinstance(value, (list, tuple)):
        for each, of in zip(value, expected, strict=True):
            check_form(each, of, what)
    elif isinstance(value, Tensor):
        tensor({what: value}, what, value.shape)
    elif type(value) is int:
        check_int(value, what, -MOST)
    elif isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{what} is not a number: {REMEDY}")


def check_optimizer(state: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Refuse the optimizer's state, with its form, in a state, if it is damaged or of other parameters."""
    found = table(state, "optimizer")
    check_form(found, table(state, "form"), "the optimizer's state")
    groups = [sequence(each, "params") for each in sequence(found, "param_groups")]
    if groups != [each["params"] for each in optimizer.state_dict()["param_groups"]]:
        raise ValueError("the state is of an optimizer of other parameters; load it into one of the same parameters")
