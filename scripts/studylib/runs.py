"""The list of runs of a study, each kept as a file once it is done, and the processes that work through what is missing."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchlib import machine, report

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
        told_apart = hashlib.sha256(json.dumps(self.key(), sort_keys=True).encode()).hexdigest()[:12]
        return folder / f"{self.task}-{machine.slug(self.spec)[:80]}-seed{self.seed}-{told_apart}.json"

    def load(self, folder: Path) -> train.Record | None:
        """What is on record of this run; None if it has not come to its end yet."""
        try:
            kept = json.loads(self.path(folder).read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            raise ValueError(f"{self.path(folder).name} in {folder.name} is no JSON; delete it, and it is made again") from None
        return dict(kept)


def perform(run: Run, folder: Path, commit: str | None) -> train.Record:
    """Trains, and keeps the record."""
    record = {"run": run.key(), "commit": commit, **train.run(run.task, run.spec, run.seed, run.ranks, run.settings)}
    report.write_json(run.path(folder), record)
    return record


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
