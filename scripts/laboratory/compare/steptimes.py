"""Step times: performs the missing launches, keeps their results, and merges the launches of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from laboratory import machine
from laboratory.compare.plan import Plan, bytes_needed, parameters
from laboratory.refusal import Refused
from laboratory.timing import Spread
from laboratory.train import kept
from laboratory.train.launch import Launch


class Timed(NamedTuple):
    """A spec's steps on one cluster: times, each round's median over none's, and the bytes of the rank that sends most."""

    ms: Spread
    over_none: list[float]
    bytes: int


def complete(plan: Plan, folder: Path) -> None:
    """Perform the missing launches."""
    every = [launch for width in plan.widths for cluster in plan.clusters() for launch in plan.launches(*cluster, width)]
    kept.complete(every, folder, _work, check=_check_memory)


def _work(launch: Launch) -> float:
    """Estimate how long a launch takes, in any unit."""
    return launch.hosts * (parameters(launch.settings.width) * len(launch.ways) + 2e7)


def _check_memory(launch: Launch) -> None:
    needed, free = bytes_needed(launch.hosts, launch.settings.width, len(launch.ways)) / 1e9, machine.memory_available() / 1e9
    if needed > free:
        raise Refused(
            f"{launch.hosts} ranks of width {launch.settings.width} with {len(launch.ways)} specs need about {needed:.0f} GB, "
            f"but {free:.0f} GB are free; lower --memory to put fewer specs into one launch"
        )


def together(finished: Sequence[dict[str, Any]]) -> dict[str, Timed]:
    """Merge the launches of one cluster. The line of none is the first launch's."""
    found: dict[str, Timed] = {}
    for each in finished:
        lines = {line["way"]: line for line in each["run"]["lines"]}
        floor = lines["none"]["ms_of_rounds"]
        for spec, line in lines.items():
            over_none = [own / none for own, none in zip(line["ms_of_rounds"], floor, strict=True)]
            found.setdefault(spec, Timed(Spread(**line["ms"]), over_none, line["bytes_per_step"]))
    return found


def throughput(own: Timed, other: Timed) -> Spread:
    """Divide two specs' steps a second. Each round's time is taken over none's, which cancels within a launch."""
    return Spread.of([b / a for a, b in zip(own.over_none, other.over_none, strict=True)])
