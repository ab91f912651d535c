"""Ways to exchange gradients: which there are beside specs of gradcomp, and what a door makes of a way."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn

import gradcomp
from gradcomp.handle import beginning_of
from laboratory import options
from laboratory.options import Refused

HOROVOD, DDP = "horovod", "ddp"
DOORS = (HOROVOD, DDP)

# The doors of FSDP2, which only step times have: shards on all ranks, replicas of two shards, and replicas of one.
SHARDS = {"fsdp": 0, "hsdp": 2, "replicate": 1}
TIMED = (*DOORS, *SHARDS)

# The door of ranks that one process simulates.
SIMULATED = "simulated"

# Local steps: every, outer rate, outer momentum, and the spec of the exchange.
LOCAL = re.compile(r"local:([1-9]\d*)/(\d[\d.]*)/(0[\d.]*)/(.+)")

# PowerSGD's hook compresses from this step on, if no other is given. It refuses a lower one with error feedback.
POWERSGD_FROM = 2


class Other(NamedTuple):
    """A way that is no spec. example: the text that a user may write. knob: the pattern of its number behind the name."""

    doors: tuple[str, ...]
    about: str
    example: str
    knob: str = ""


OTHERS = {
    "none": Other(TIMED, "no exchange of gradients, the lower limit", "none"),
    "stock": Other(TIMED, "Horovod, DDP or FSDP2 itself, dense", "stock"),
    "fp16": Other(DOORS, "Horovod's Compression.fp16, or DDP's hook", "fp16"),
    "bf16": Other(
        (DDP, *SHARDS),
        "DDP's hook, or FSDP2's reduce_dtype; steps=4 adds up the gradients of four batches, under DDP",
        "bf16:steps=4",
        r"(?::steps=([1-9]\d*))?",
    ),
    "powersgd": Other(
        (DDP,),
        "DDP's hook; start=200 is dense in the steps before, as torch advises for a tenth of a training",
        "powersgd:rank=4",
        r":rank=([1-9]\d*)(?:,start=([2-9]|[1-9]\d+))?",
    ),
    "alltoall": Other(("fsdp",), "FSDP2's reduce-scatter by an all-to-all of float32", "alltoall"),
    "mixed": Other(("fsdp", "hsdp"), "FSDP2 with weights in bfloat16 and gradients in float32", "mixed"),
    "mixed-bf16": Other(("fsdp", "hsdp"), "FSDP2 with weights and gradients in bfloat16", "mixed-bf16"),
    "mixed-alltoall": Other(("fsdp",), "mixed with its reduce-scatter by an all-to-all", "mixed-alltoall"),
    "weights": Other(
        ("fsdp", "hsdp"),
        "mixed with blocks for gradients, and for weights; in a study, simulated, with dense gradients",
        "weights:bits=8",
        r":bits=([2-8])",
    ),
}


class LocalWay(NamedTuple):
    """Local steps, as a way of simulated ranks."""

    every: int
    rate: float
    momentum: float
    spec: str


def local_of(way: str) -> LocalWay | None:
    """Read a way of local steps; None for others."""
    if not way.startswith("local:"):
        return None
    if (found := LOCAL.fullmatch(way)) is None:
        raise ValueError(
            f"{way!r} is no way of local steps; write local:EVERY/RATE/MOMENTUM/SPEC, such as local:30/0.9/0.7/topk"
        )
    return LocalWay(int(found[1]), float(found[2]), float(found[3]), found[4])


def other(way: str) -> tuple[str, float] | None:
    """Return the name and the first number of a way that is no spec: 1 without one. None for a spec. Refuse a wrong one."""
    name = way.partition(":")[0]
    if name not in OTHERS:
        return None
    if not (found := re.fullmatch(name + OTHERS[name].knob, way)):
        raise ValueError(f"{way!r} is not a way to exchange gradients; write for example {OTHERS[name].example}")
    return name, float(found[1] or 1) if found.re.groups else 1.0


def powersgd_from(way: str) -> int:
    """Return the step from which a way of PowerSGD compresses."""
    found = re.fullmatch("powersgd" + OTHERS["powersgd"].knob, way)
    return int(found[2] or POWERSGD_FROM) if found else POWERSGD_FROM


def is_spec(way: str) -> bool:
    """Return True for a spec of gradcomp that names its compressor: auto does not, and local steps have one inside."""
    return other(way) is None and not way.startswith(("auto", "local:"))


def acts_on_updates(way: str) -> bool:
    """Return True for a spec whose ranks step by themselves, and then exchange updates."""
    return is_spec(way) and gradcomp.make(way).traits.acts_on_updates


def is_studied(way: str) -> bool:
    """Return True if a study can train by this way: one that exchanges gradients, and counts its bytes."""
    found = other(way)
    return found is None or found[0] in ("stock", "fp16", "bf16", "powersgd", "weights")


def weight_bits(way: str) -> int | None:
    """Return the bits in which a way gathers weights; None where they are whole."""
    found = other(way)
    return int(found[1]) if found is not None and found[0] == "weights" else None


def clips(way: str, door: str) -> bool:
    """Return True if each rank can clip its gradient before the exchange."""
    found = other(way)
    return door == SIMULATED or (door == DDP and found is not None and is_studied(way))


def passes(way: str) -> int:
    """Return the batches between two exchanges."""
    found = other(way)
    return int(found[1]) if found is not None and found[0] == "bf16" else 1


def check(way: str) -> None:
    """Refuse a wrong way."""
    local = local_of(way)
    if other(way) is None:
        try:
            beginning_of(local.spec if local else way)
        except ValueError as error:
            raise ValueError(f"{error} (beside gradcomp's specs: {', '.join(OTHERS)}, local)") from None


def refuse(chosen: Sequence[str], door: str) -> None:
    """Refuse ways that a door does not have."""
    for way in chosen:
        if local_of(way) is not None and door != DDP:
            raise Refused(f"{way!r} is of the door {DDP} and of simulated ranks, not of {door}")
        found = other(way)
        if found is not None and door not in OTHERS[found[0]].doors:
            raise Refused(f"{way!r} is of the door {' or '.join(OTHERS[found[0]].doors)}, not of {door}")
        if door in SHARDS and (way.startswith("auto") or passes(way) > 1):
            raise Refused(f"{way!r} is not of the door {door}; leave it out, or use --door ddp")


def several(text: str) -> list[str]:
    """Read ways separated by semicolons or commas."""
    return options.specs(text, check)


class Fitted(NamedTuple):
    """A model and an optimizer that exchange gradients in some way.

    bytes_sent: by this rank in the last step; None if unknown. stats: gradcomp's, if it is at work.
    """

    model: nn.Module
    optimizer: Any
    bytes_sent: Callable[[], int | None]
    stats: Callable[[], Mapping[str, Any]] = dict


class Door(Protocol):
    """The ranks behind a door, and what fits a way to a model."""

    rank: int
    size: int

    def means(self, own: list[float], name: str) -> list[float]:
        """Return the means of figures over the ranks."""

    def fit(self, way: str, model: nn.Module, optimizer: Any, seed: int, clip: float) -> Fitted:
        """Fit a way to a model and its optimizer. clip: the longest gradient of a rank, if the way can clip; 0: any length."""

    def end(self) -> None:
        """Leave the ranks, when all of them are done."""
