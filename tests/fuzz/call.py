"""A fuzzed call: made for a kernel, run through the binding, and held to the contract of all calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from fuzz import declared
from fuzz.drawn import Draw, Lent

KERNELS = declared.kernels()
SCRATCHES = declared.scratches()
# Kernels that write into gradients, or into weights. ops.inc declares all pieces alike.
WRITES_PIECES = ("read_blocks", "spread", "offer_progress", "deliver_progress")

# Exceptions by which the binding, pybind11 and the array libraries refuse a call.
REFUSALS = (ValueError, TypeError, RuntimeError, BufferError, NotImplementedError)

# The comparison with the definition of a kernel, after the run; None if it does not define these arguments.
Check = Callable[[], None] | None
Made = tuple[dict[str, Any], Check]
MAKERS: dict[str, Callable[[Draw], Made]] = {}


def maker(make: Callable[[Draw], Made]) -> Callable[[Draw], Made]:
    """Register the function that makes legal calls of the kernel of its name."""
    MAKERS[make.__name__] = make
    return make


class Outcome(NamedTuple):
    """The outcome of a call. refused: by an exception. compared: with the definition."""

    refused: bool
    compared: bool


class Wrong(AssertionError):
    """A call that broke its contract."""


def run(native: Any, kernel: str, values: dict[str, Any], check: Check, threads: int, legal: bool) -> Outcome:
    """Call the kernel, and hold it to its contract. legal: it must not refuse. A refused call must not have written."""
    missing = [each.name for each in KERNELS[kernel] if each.name not in values]
    if missing:
        raise Wrong(f"no value is made for {', '.join(missing)}")
    arguments = [given(values[each.name]) for each in KERNELS[kernel]]
    refused = False
    try:
        getattr(native, kernel)(*arguments, *values.get("more", ()), stream=0, threads=threads)
    except REFUSALS as error:
        refused = True
        if legal:
            raise Wrong(f"a legal call was refused: {error}") from error
        if len(str(error)) < 10:
            raise Wrong(f"a refusal says no more than {error!r}") from error
    for argument in KERNELS[kernel]:
        written = argument.written and not refused and (argument.kind != "pieces" or kernel in WRITES_PIECES)
        for lent in lents(values[argument.name]):
            if not lent.guarded():
                raise Wrong(f"it wrote outside of {argument.name}")
            if not (written or lent.unchanged()):
                raise Wrong(f"it wrote into {argument.name}" + (" before it refused the call" if refused else ""))
    if check is not None and not refused:
        check()
    return Outcome(refused, check is not None and not refused)


def given(value: Any) -> Any:
    """Return the value that Python hands to the binding."""
    if isinstance(value, Lent):
        return value.given
    return [given(each) for each in value] if type(value) is list else value


def lents(value: Any) -> Iterator[Lent]:
    """Yield the arrays of an argument."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, Lent):
            yield each


def describe(values: dict[str, Any]) -> str:
    """Write the arguments with their types, sizes and first entries."""
    return ", ".join(f"{name}={_shown(value)}" for name, value in values.items())


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value[:4]))}{', ...' if len(value) > 4 else ''}]"
    if isinstance(value, Lent):
        return f"{value.was.dtype}[{len(value)}]{value.was[:4].tolist() if value.was.dtype.kind in 'iu' else ''}"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} on {value.device}, {tuple(value.shape)}"
    return repr(value)[:80]


def expect(holds: bool, what: str) -> None:
    """Raise if a contract does not hold."""
    if not holds:
        raise Wrong(what)


def scratch_call(native: Any, name: str, draw: Draw) -> Outcome:
    """Ask for a size of scratch with any numbers. It must be a size or a refusal: the kernel may refuse the numbers later."""
    numbers = [draw.choice((0, 1, draw.size(), 2**31, 2**62, 2**63 - 1, -(2**63), -1)) for _ in range(2)]
    try:
        words = getattr(native, name)(draw.likely(0.5), *numbers)
    except REFUSALS:
        return Outcome(True, False)
    expect(isinstance(words, int) and words >= 0, f"{name}{tuple(numbers)} is {words} words")
    return Outcome(False, False)
