"""Step times: performs the missing launches, keeps their results, and merges the launches of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from laboratory import machine
from laboratory.compare.plan import Plan, bytes_needed, parameters
from laboratory.refusal import Refused
from laboratory.report import results
from laboratory.report.progress import TimeLeft
from laboratory.timing import Spread
from laboratory.train import launch as train


class Timed(NamedTuple):
    """A spec's steps on one cluster: times, each round's median over none's, and the bytes of the rank that sends most."""

    ms: Spread
    over_none: list[float]
    bytes: int


def file_of(launch: train.Launch, folder: Path) -> Path:
    """Name the file of a launch."""
    return results.kept(folder, f"{launch.hosts}-hosts-{launch.rate}-width-{launch.width}", launch._asdict())


def complete(plan: Plan, folder: Path) -> None:
    """Perform the missing launches, one after the other: each needs the whole machine."""
    every = [launch for width in plan.widths for cluster in plan.clusters() for launch in plan.launches(*cluster, width)]
    missing = [launch for launch in every if results.read(file_of(launch, folder)) is None]
    finished, left = len(every) - len(missing), TimeLeft(map(_work, missing))
    print(f"{len(every)} launches, {finished} of them finished", flush=True)
    for launch in missing:
        _check_memory(launch)
        where = f"{launch.hosts} hosts, {launch.rate}, width {launch.width}"
        run = train.perform(launch, where)
        results.write(file_of(launch, folder), {"launch": launch._asdict(), "commit": machine.commit(), "run": run})
        finished += 1
        print(f"launch {finished} of {len(every)}  {where}  {len(launch.specs)} specs  {left.after(_work(launch))}", flush=True)


def _work(launch: train.Launch) -> float:
    """Estimate how long a launch takes, in any unit."""
    return launch.hosts * (parameters(launch.width) * len(launch.specs) + 2e7)


def _check_memory(launch: train.Launch) -> None:
    needed, free = bytes_needed(launch.hosts, launch.width, len(launch.specs)) / 1e9, machine.memory_available() / 1e9
    if needed > free:
        raise Refused(
            f"{launch.hosts} ranks of width {launch.width} with {len(launch.specs)} specs need about {needed:.0f} GB, but "
            f"{free:.0f} GB are free; lower --memory to put fewer specs into one launch"
        )


def load(launches: Sequence[train.Launch], folder: Path) -> list[dict[str, Any]]:
    """Read the results of the finished launches."""
    return [kept for launch in launches if (kept := results.read(file_of(launch, folder))) is not None]


def together(kept: Sequence[dict[str, Any]]) -> dict[str, Timed]:
    """Merge the launches of one cluster. The line of none is the first launch's."""
    found: dict[str, Timed] = {}
    for each in kept:
        lines = {line["spec"]: line for line in each["run"]["lines"]}
        floor = lines["none"]["ms_of_rounds"]
        for spec, line in lines.items():
            over_none = [own / none for own, none in zip(line["ms_of_rounds"], floor, strict=True)]
            found.setdefault(spec, Timed(Spread(**line["ms"]), over_none, line["bytes_per_step"]))
    return found


def throughput(own: Timed, other: Timed) -> Spread:
    """Divide two specs' steps a second. Each round's time is taken over none's, which cancels within a launch."""
    return Spread.of([b / a for a, b in zip(own.over_none, other.over_none, strict=True)])
