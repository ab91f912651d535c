"""Faults of order: every barrier, fence and __ldcg of the CUDA kernels, left out one at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mutations.fault import Fault

FOLDER = "csrc/cuda"
ORDERS = re.compile(r"\b__(syncthreads\w*|syncwarp|threadfence|ldcg)\(")
CONTROL = ("for", "if", "while")
# The tests that run a file's kernels, besides those of all kernels.
TESTS = {
    "block.cuh": ("test_take.py", "test_above.py", "test_packed.py"),
    "block_moments.cuh": ("test_above.py", "test_gradients.py"),
    "block_records.cuh": ("test_above.py", "test_gradients.py"),
    "above.cu": ("test_above.py",),
    "device_pack.cuh": ("test_packed.py", "test_take.py", "test_above.py"),
    "device_plan.cuh": ("test_take.py", "test_above.py"),
    "device_select.cuh": ("test_take.py", "test_above.py"),
    "collect.cu": ("test_gradients.py", "test_above.py"),
    "heaviest.cu": ("test_sketch.py",),
    "levels.cu": ("test_levels.py",),
    "packed.cu": ("test_packed.py",),
    "progress.cu": ("test_progress.py",),
    "round.cu": ("test_levels.py",),
    "sketch.cu": ("test_sketch.py",),
}
ALL = "test_definitions.py"
# Faults that no test finds, and why that is right.
REASONS: dict[str, str] = {}


def end_of_call(text: str, begin: int) -> int:
    """Find the end of a call. Its arguments begin behind the parenthesis before `begin`."""
    depth = 1
    while depth > 0:
        depth += {"(": 1, ")": -1}.get(text[begin], 0)
        begin += 1
    return begin


def without(name: str, arguments: str) -> str:
    """Write the rest of a call: a plain read, a thread's own vote, or nothing."""
    return f"(*({arguments}))" if name == "ldcg" else f"({arguments})" if "_" in name else ""


def passage(text: str, begin: int, end: int, everything: str) -> tuple[int, int]:
    """Widen a place to whole lines that stand once in all files."""
    first, last = text.rfind("\n", 0, begin) + 1, text.index("\n", end)
    while everything.count(text[first:last]) > 1:
        first = text.rfind("\n", 0, first - 1) + 1
        last = text.index("\n", last + 1)
    return first, last


def function_around(text: str, begin: int) -> str:
    """Name the function around a place: the last one with a head, at the left or in a struct, before it."""
    heads = re.findall(r"^(?:  )?[_a-z](?:[^;{}]|\{\})*\{$", text[:begin], re.MULTILINE)
    names = [re.findall(r"\b(\w+)\(", re.sub(r"__launch_bounds__\([\w<>, ]+\)", "", head)) for head in heads]
    return next(found[0] for found in reversed(names) if found and found[0] not in CONTROL)


def removals(path: Path, everything: str) -> Iterator[Fault]:
    """Make a fault of each barrier, fence and __ldcg in a file."""
    text = path.read_text()
    names: dict[str, int] = {}
    for found in ORDERS.finditer(text):
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if "//" in line:
            continue
        end = end_of_call(text, found.end())
        first, last = passage(text, found.start(), end, everything)
        wrong = without(found[1], text[found.end() : end - 1])
        name = f"order: {path.name}, {function_around(text, found.start())}, without {found[0][:-1]}"
        names[name] = names.get(name, 0) + 1
        yield Fault(
            f"{name} {names[name]}",
            FOLDER,
            text[first:last],
            text[first : found.start()] + wrong + text[end:last],
            (*TESTS.get(path.name, ("test_take.py", "test_above.py", "test_gradients.py", "test_packed.py")), ALL),
        )


FILES = sorted((Path(__file__).resolve().parents[2] / FOLDER).iterdir())
EVERYTHING = "".join(path.read_text() for path in FILES)
ORDER_FAULTS = tuple(fault for path in FILES for fault in removals(path, EVERYTHING))
