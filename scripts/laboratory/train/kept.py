"""Launches whose results are kept as files: what was interrupted continues where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from laboratory import machine
from laboratory.report import results
from laboratory.report.progress import TimeLeft
from laboratory.train import launch as launches
from laboratory.train.launch import Launch


def file_of(launch: Launch, folder: Path) -> Path:
    """Name the file of a launch."""
    what = f"{launch.task}-{launch.door}-{launch.hosts}-hosts-{launch.rate}-width-{launch.settings.width}"
    return results.kept(folder, what, launch.key())


def complete(
    every: Sequence[Launch],
    folder: Path,
    work: Callable[[Launch], float],
    *,
    check: Callable[[Launch], None] = lambda launch: None,
    data: Path | None = None,
    projects: Path | None = None,
) -> None:
    """Perform the missing launches, one after the other: each needs the whole machine.

    work: how long a launch takes, in any unit. check: refuses a launch. data: the folder of prepared data. projects: of
    published projects.
    """
    missing = [launch for launch in every if results.read(file_of(launch, folder)) is None]
    finished, left = len(every) - len(missing), TimeLeft(map(work, missing))
    print(f"{len(every)} launches, {finished} of them finished", flush=True)
    for launch in missing:
        check(launch)
        where = f"{launch.hosts} hosts, {launch.rate}, {launch.task} by {launch.door}, width {launch.settings.width}"
        run = launches.perform(launch, where, data, projects)
        results.write(file_of(launch, folder), {"launch": launch.key(), "commit": machine.commit(), "run": run})
        finished += 1
        print(f"launch {finished} of {len(every)}  {where}  {len(launch.ways)} ways  {left.after(work(launch))}", flush=True)


def load(every: Sequence[Launch], folder: Path) -> list[dict[str, Any]]:
    """Read the results of the finished launches."""
    return [kept for launch in every if (kept := results.read(file_of(launch, folder))) is not None]
