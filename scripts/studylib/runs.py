"""The list of runs of a study, each kept as a file once it is done, and the processes that work through what is missing."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchlib import machine, report, store
from benchlib.train import KEEPS_MEMORY

from studylib import train
from studylib.tasks import Settings


class Run(NamedTuple):
    """Everything that decides how a run comes out, but for the code."""

    task: str
    spec: str
    seed: int
    ranks: int
    settings: Settings

    def key(self) -> dict[str, Any]:
        return {**self._asdict(), "settings": self.settings._asdict()}

    def path(self, folder: Path) -> Path:
        return store.path(folder, f"{self.task}-{machine.slug(self.spec)[:80]}-seed{self.seed}", self.key())

    def load(self, folder: Path) -> train.Record | None:
        """What is on record of this run; None if it has not come to its end yet."""
        return store.load(self.path(folder))


def perform(run: Run, folder: Path, commit: str | None) -> train.Record:
    """Trains, and keeps the record."""
    record = {"run": run.key(), "commit": commit, **train.run(run.task, run.spec, run.seed, run.ranks, run.settings)}
    report.write_json(run.path(folder), record)
    return record


BySpec = dict[str, dict[int, train.Record]]


def records(runs: Sequence[Run], folder: Path) -> BySpec:
    """What is on record of these runs, by spec and seed; a spec of which nothing is there has an empty place."""
    found: BySpec = {run.spec: {} for run in runs}
    for run in runs:
        if (record := run.load(folder)) is not None:
            found[run.spec][run.seed] = record
    return found


def complete(runs: Sequence[Run], folder: Path, jobs: int, work: Callable[[Run], float] = lambda run: 1.0) -> None:
    """Performs those that are missing, and says after each how far it is. work() is how long each takes, in whatever unit."""
    missing = [run for run in runs if run.load(folder) is None]
    finished, left = len(runs) - len(missing), report.Left(map(work, missing))
    print(f"{len(runs)} runs, {finished} of them already there", flush=True)

    def tell(run: Run, record: train.Record) -> None:
        nonlocal finished
        finished += 1
        what = f"{run.task}  {run.spec}  seed {run.seed}  loss {record['losses'][-1]}  score {record['score']:.2f}"
        print(f"run {finished} of {len(runs)}  {what}  {record['seconds']:.0f} s, {left.after(work(run))}", flush=True)

    perform_all(missing, folder, jobs, tell)


def perform_all(
    runs: Sequence[Run], folder: Path, jobs: int, done: Callable[[Run, train.Record], object] = lambda run, record: None
) -> None:
    """Performs them in `jobs` processes of one thread each; done() is called after each, in whatever order they end."""
    commit = machine.commit()
    for run, record in (_together if jobs > 1 else _here)(runs, folder, jobs, commit):
        done(run, record)


def _here(runs: Sequence[Run], folder: Path, jobs: int, commit: str | None) -> Iterator[tuple[Run, train.Record]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for run in runs:
            yield run, perform(run, folder, commit)
    finally:
        torch.set_num_threads(threads)


def _together(runs: Sequence[Run], folder: Path, jobs: int, commit: str | None) -> Iterator[tuple[Run, train.Record]]:
    for name, value in KEEPS_MEMORY.items():
        os.environ.setdefault(name, value)  # for the new processes: a gradient's page faults cost as much as its backward pass
    fresh = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(runs) or 1), mp_context=fresh, initializer=_begin)
    try:
        waiting = {pool.submit(perform, run, folder, commit): run for run in runs}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """A worker's first act: one thread, and Ctrl-C is left to the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
