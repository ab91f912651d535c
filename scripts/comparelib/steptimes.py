"""Step times: launches what is missing, keeps what each launch measured, and brings a cluster's launches together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchlib import machine, report, store, train
from benchlib.rounds import Spread

from comparelib.plan import Plan, bytes_needed, parameters


class Timed(NamedTuple):
    """A spec's steps on one cluster: their times, their medians in each round over none's, and what the busiest rank sends."""

    ms: Spread
    over_none: list[float]
    bytes: int


def file_of(launch: train.Launch, folder: Path) -> Path:
    return store.path(folder, f"{launch.hosts}-hosts-{launch.rate}-width-{launch.width}", launch._asdict())


def complete(plan: Plan, folder: Path) -> None:
    """Measures what is missing, each launch by itself, for it needs the whole machine."""
    every = [launch for width in plan.widths for cluster in plan.clusters() for launch in plan.launches(*cluster, width)]
    missing = [launch for launch in every if store.load(file_of(launch, folder)) is None]
    finished, left = len(every) - len(missing), report.Left(map(_work, missing))
    print(f"{len(every)} launches, {finished} of them already there", flush=True)
    for launch in missing:
        _check_memory(launch)
        where = f"{launch.hosts} hosts, {launch.rate}, width {launch.width}"
        run = train.perform(launch, where)
        report.write_json(file_of(launch, folder), {"launch": launch._asdict(), "commit": machine.commit(), "run": run})
        finished += 1
        print(f"launch {finished} of {len(every)}  {where}  {len(launch.specs)} specs  {left.after(_work(launch))}", flush=True)


def _work(launch: train.Launch) -> float:
    """About how long it takes, in whatever unit."""
    return launch.hosts * (parameters(launch.width) * len(launch.specs) + 2e7)


def _check_memory(launch: train.Launch) -> None:
    needed, free = bytes_needed(launch.hosts, launch.width, len(launch.specs)) / 1e9, machine.memory_available() / 1e9
    if needed > free:
        raise ValueError(
            f"{launch.hosts} ranks of width {launch.width} with {len(launch.specs)} specs need about {needed:.0f} GB, of which "
            f"{free:.0f} are free; give a smaller --memory, and fewer specs are held at once"
        )


def load(launches: Sequence[train.Launch], folder: Path) -> list[dict[str, Any]]:
    """What was measured of these launches so far."""
    return [kept for launch in launches if (kept := store.load(file_of(launch, folder))) is not None]


def together(kept: Sequence[dict[str, Any]]) -> dict[str, Timed]:
    """All specs of one cluster; none's own line is that of the first launch."""
    found: dict[str, Timed] = {}
    for each in kept:
        lines = {line["spec"]: line for line in each["run"]["lines"]}
        floor = lines["none"]["ms_of_rounds"]
        for spec, line in lines.items():
            over_none = [own / none for own, none in zip(line["ms_of_rounds"], floor, strict=True)]
            found.setdefault(spec, Timed(Spread(**line["ms"]), over_none, line["bytes_per_step"]))
    return found


def throughput(own: Timed, other: Timed) -> Spread:
    """Steps a second over those of another. Each round's times are taken over none's, which cancels within a launch."""
    return Spread.of([b / a for a, b in zip(own.over_none, other.over_none, strict=True)])
