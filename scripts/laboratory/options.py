"""Types of options: sizes, rates, specs, names, folders. Each refuses a wrong value with a sentence before anything starts.

scripts/cluster and gpu_check use this file where no torch is: gradcomp is imported late.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from laboratory.machine import ROOT, slug

# Hosts of the emulated cluster, at most.
MOST_HOSTS = 250

T = TypeVar("T")


class Refused(ValueError):
    """A command that cannot be carried out. The message says what is wrong and what to do."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Ask whether the nearest known word is meant; empty where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def size(text: str) -> int:
    """Read 16.8M, 500k or 1000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kM]?)", text)
    count = round(float(found[1]) * {"": 1, "k": 1000, "M": 1_000_000}[found[2]]) if found else 0
    if not 1000 <= count < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size from 1000 to 2147M; write for example 16.8M, 500k or 100000")
    return count


def positive(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def above_0(text: str) -> float:
    """Read a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def listed(text: str | list[str], read: Callable[[str], T]) -> list[T]:
    """Read values that differ, separated by commas if they are one text. Refuse none, and one that is given twice."""
    parts = [part.strip() for part in text.split(",")] if isinstance(text, str) else text
    if not parts:
        raise argparse.ArgumentTypeError("nothing is given; see --help for examples")
    for part in parts:
        if parts.count(part) > 1:
            raise argparse.ArgumentTypeError(f"{part!r} is given twice")
    return [read(part) for part in parts]


def some_of(names: Iterable[str], between: str = ",") -> Callable[[str], list[str]]:
    """Return a reader of some of these names."""

    def read(text: str) -> list[str]:
        known = [*names]
        chosen = [each.strip() for each in text.split(between)]
        for each in chosen:
            if each not in known:
                raise argparse.ArgumentTypeError(f"{each!r} is none of: {', '.join(known)}{suggest(each, known)}")
        return chosen

    return read


def hosts(text: str) -> int:
    """Read the size of an emulated cluster."""
    if positive(text) > MOST_HOSTS:
        raise argparse.ArgumentTypeError(f"{text!r}: an emulated cluster has at most {MOST_HOSTS} hosts; write for example 4")
    return int(text)


def rate(text: str) -> str:
    """Read 1gbit: the rate of emulated links."""
    found = text.strip().lower()
    if not re.fullmatch(r"none|(?=.*[1-9])\d+(\.\d+)?[kmgt]?bit", found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate; write for example 1gbit, 100mbit or none")
    return found


def later(text: str) -> tuple[str, float]:
    """Read 100mbit:60: the rate that links get after so many seconds."""
    found, colon, seconds = text.partition(":")
    if not colon or not re.fullmatch(r"\d+(\.\d+)?", seconds):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate and seconds; write for example 100mbit:60")
    return rate(found), above_0(seconds)


def name(text: str) -> str:
    """Read a part of a file's name."""
    if not text or slug(text) != text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a part of a file's name; use small letters, digits and hyphens")
    return text


def folder(text: str) -> Path:
    """Read a folder that can be written to, or made."""
    path = Path(text)
    nearest = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not nearest.is_dir():
        raise argparse.ArgumentTypeError(f"{str(nearest)!r} is not a folder; name a folder, which need not exist yet")
    if not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"this user may not write to {str(nearest.resolve())!r}; name another folder")
    return path


def checkout(text: str) -> Path:
    """Read the folder of a checkout of gradcomp with a built package."""
    package = Path(text) / "gradcomp"
    if not (package / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a checkout of gradcomp: it has no gradcomp/__init__.py")
    if not any(package.glob("_native*.so")):
        raise argparse.ArgumentTypeError(f"{text!r} has no built gradcomp/_native*.so; run scripts/setup there")
    return Path(text)


def specs(text: str, check: Callable[[str], object] | None = None) -> list[str]:
    """Read specs separated by semicolons or commas. `name=value` without a colon is a knob of the spec before it.

    check: raises ValueError for a wrong spec; by default, what is none of gradcomp's is wrong.
    """
    import gradcomp

    found: list[str] = []
    for part in filter(None, (part.strip() for part in re.split("[;,]", text))):
        if found and ":" in found[-1] and "=" in part and ":" not in part:
            found[-1] += "," + part
        else:
            found.append(part)

    def checked(spec: str) -> str:
        try:
            (check or gradcomp.make)(spec)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return spec

    return listed(found, checked)


def add_places(
    parser: argparse.ArgumentParser, name_of: str | None, cache: Path | None = None, out: Path = ROOT / "benchmarks" / "results"
) -> None:
    """Add the options for the result's name, unless it has none, and folder, and for the folder of finished work."""
    if name_of is not None:
        parser.add_argument("--name", type=name, help=f"last part of the result file's name (default: {name_of})")
    for option, path, what in (("--out", out, "the result"), ("--cache", cache, "finished work")):
        if path is not None:
            text = f"folder of {what} (default: {path.relative_to(ROOT)})"
            parser.add_argument(option, type=folder, default=path, metavar="FOLDER", help=text)
