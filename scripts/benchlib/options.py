"""What bench.py is told, checked before anything is started: sizes, rates, specs."""

from __future__ import annotations

import argparse
import re

import gradcomp

BUILT_IN = {
    "none": "no communication at all: the limit",
    "sync": "one number, once a step: the limit of ranks that wait for one another",
    "horovod": "Horovod as it is, dense",
    "fp16": "Horovod's own Compression.fp16",
}


def size(text: str) -> int:
    """16.8M, 500k, 1000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kM]?)", text)
    count = round(float(found[1]) * {"": 1, "k": 1000, "M": 1_000_000}[found[2]]) if found else 0
    if not 1000 <= count < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size from 1000 to 2147M; write for example 16.8M, 500k or 100000")
    return count


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def arch(text: str) -> str:
    """A GPU's architecture, as nvcc writes it."""
    if not re.fullmatch(r"sm_\d+[af]?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an architecture; write for example sm_90")
    return text


def hosts(text: str) -> list[int]:
    """Sizes of emulated clusters whose hosts send to one another."""
    found = [positive(part.strip()) for part in text.split(",")]
    if not all(2 <= count <= 250 for count in found):
        raise argparse.ArgumentTypeError(f"{text!r}: a cluster has from 2 to 250 hosts here; write for example 2,4,8")
    return found


def rates(text: str) -> list[str]:
    """Links of the emulated cluster, as scripts/cluster writes them."""
    found = [part.strip().lower() for part in text.split(",")]
    for rate in found:
        if not re.fullmatch(r"none|(?=.*[1-9])\d+(\.\d+)?[kmgt]?bit", rate):
            raise argparse.ArgumentTypeError(f"{rate!r} is not a rate; write for example 1gbit,100mbit")
    return found


def split_specs(text: str) -> list[str]:
    """Specs one after the other; a part that is a knob (name=value without a colon) belongs to the spec before it."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if found and ":" in found[-1] and "=" in part and ":" not in part:
            found[-1] += "," + part
        else:
            found.append(part)
    return found


def specs(text: str) -> list[str]:
    found = split_specs(text)
    if not found:
        raise argparse.ArgumentTypeError("no spec is given")
    for spec in found:
        if found.count(spec) > 1:
            raise argparse.ArgumentTypeError(f"{spec!r} is given twice")
        if spec in BUILT_IN:
            continue
        try:
            gradcomp.make(spec)
        except ValueError as error:
            own = ", ".join(BUILT_IN)
            raise argparse.ArgumentTypeError(f"{error} (beside gradcomp's specs there are {own})") from None
    return found


def own_specs(text: str) -> list[str]:
    """Specs of gradcomp alone."""
    found = specs(text)
    for spec in found:
        if spec in BUILT_IN:
            raise argparse.ArgumentTypeError(f"{spec!r} is not a spec of gradcomp: its requests cannot be counted")
    return found
