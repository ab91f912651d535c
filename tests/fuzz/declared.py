"""The kernels as csrc/ops.inc declares them: every argument's name and type, in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

OPS = [Path(__file__).resolve().parents[2] / "csrc" / name for name in ("ops.inc", "ops_chains.inc")]

# NumPy's names of the types of entries. torch has few operations for unsigned words, so the binding takes signed ones, too.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "int32_t": "int32",
    "uint8_t": "uint8",
    "uint32_t": "uint32",
    "uint64_t": "uint64",
}
SCALARS = ("int64_t", "float", "bool")


class Argument(NamedTuple):
    """One argument.

    kind: "array", "arrays" (one from each rank), "pieces" (gradients), "int64_t", "float" or "bool".
    dtype: of an array's entries; empty for numbers and gradients.
    """

    name: str
    kind: str
    dtype: str
    optional: bool
    written: bool


def kernels() -> dict[str, list[Argument]]:
    """Read every kernel's arguments, without the queue."""
    found = {}
    for name, arguments in re.findall(r"^KERNEL\((\w+),\s*\(([^)]*)\)", _declarations(), re.MULTILINE):
        words = [each.strip() for each in arguments.split(",")]
        assert words.pop() == "Queue queue", name
        found[name] = [_argument(each) for each in words]
    return found


def scratches() -> list[str]:
    """Read the names of the functions that size scratch."""
    return [f"{name}_scratch" for name in re.findall(r"^SCRATCH\((\w+),", _declarations(), re.MULTILINE)]


def _declarations() -> str:
    return re.sub(r"//.*", "", "\n".join(file.read_text() for file in OPS))


def _argument(declared: str) -> Argument:
    type_, _, name = declared.rpartition(" ")
    if type_ in SCALARS:
        return Argument(name, type_, "", False, False)
    if type_ == "const Pieces&":
        return Argument(name, "pieces", "", False, True)
    form = re.fullmatch(r"(?:const )?(Optional)?Span(s)?<(const )?(\w+)>&?", type_)
    assert form is not None and form[4] in DTYPES, f"csrc/ops.inc has an argument of an unknown type: {declared}"
    return Argument(name, "arrays" if form[2] else "array", DTYPES[form[4]], form[1] is not None, form[3] is None)
