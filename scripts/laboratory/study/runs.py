"""The runs of a study: one training each, kept as a file when it is finished, and processes that work through the rest."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gradcomp
from laboratory import machine
from laboratory.ranks import GLIBC_SETTINGS, termination_interrupts
from laboratory.report import results
from laboratory.report.progress import TimeLeft
from laboratory.study import peers
from laboratory.study.errors import Errors
from laboratory.tasks import prepared, training
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Job, Settings

Record = dict[str, Any]
BySeed = dict[int, Record]
BySpec = dict[str, BySeed]


class Run(NamedTuple):
    """Everything but the code that decides the outcome of a training. data: the name of the prepared file, if there is one."""

    task: str
    spec: str
    seed: int
    ranks: int
    settings: Settings
    data: str = ""

    def key(self) -> dict[str, Any]:
        """Return it as JSON."""
        found = {**self._asdict(), "settings": self.settings.key()}
        return found if self.data else {name: value for name, value in found.items() if name != "data"}

    def path(self, folder: Path) -> Path:
        """Name the file of its record."""
        return results.kept(folder, f"{self.task}-{machine.slug(self.spec)[:80]}-seed{self.seed}", self.key())

    def make_job(self, folder: Path) -> Job:
        """Make the model and the batches, of all ranks."""
        arrays = prepared.load(prepared.place(folder, self.data)) if self.data else {}
        return TASKS[self.task].make(self.settings, self.seed, self.ranks, arrays)

    def load(self, folder: Path) -> Record | None:
        """Read its record; None if the run is not finished."""
        return results.read(self.path(folder))


def train(run: Run, folder: Path) -> Record:
    """Train once. All ranks share the weights: the simulation checks that their updates are equal to the last bit."""
    began, task, settings = time.perf_counter(), TASKS[run.task], run.settings
    job, errors = run.make_job(folder), Errors()
    shapes = {name: p.shape for name, p in job.model.named_parameters()}
    kept = 0.0 if peers.is_one(run.spec) else training.momentum_of(run.spec)
    optimizer = training.optimizer_of(task, settings, job.model, kept)
    exchanges = _exchanges(run, job, optimizer, errors)

    def exchange(step: int, grads: list[training.Grads]) -> training.Grads:
        errors.begin(step)
        return exchanges.step(grads)

    losses: list[float] = []
    sent: list[int] = []
    for loss in training.descend(task, settings, job, optimizer, exchange):
        losses.append(round(loss, 6))
        sent.append(max(exchanges.bytes_sent))
    parameters = sum(shape.numel() for shape in shapes.values())
    return {
        "losses": losses,
        "sent": sent,
        "squares": errors.squares(),
        "dense_bytes": 4 * parameters * settings.steps,
        "score": job.score(),
        "parameters": parameters,
        "seconds": round(time.perf_counter() - began, 2),
    }


def _exchanges(run: Run, job: Job, optimizer: torch.optim.Optimizer, errors: Errors) -> peers.Exchange:
    """Make what exchanges the gradients: a peer, or the simulation of a spec.

    The simulation knows the optimizer where the spec needs learning rates. Where a spec only uses them, as lgc does, it is
    without in the tasks with a linear schedule, whose older records were made so.
    """
    shapes = {name: p.shape for name, p in job.model.named_parameters()}
    if peers.is_one(run.spec):
        return peers.make(run.spec, shapes, run.ranks, run.seed, errors.note)
    compressor = training.watched(run.spec, errors)
    known: dict[str, Any] = {}
    if compressor.traits.rates == "needed" or TASKS[run.task].shows_optimizer:
        known = {"optimizer": optimizer, "named_parameters": list(job.model.named_parameters())}
    return gradcomp.Simulation(compressor, shapes, run.ranks, run.seed, **known)


def perform(run: Run, folder: Path, commit: str | None) -> Record:
    """Train, and write the record."""
    record = {"run": run.key(), "commit": commit, **train(run, folder)}
    results.write(run.path(folder), record)
    return record


def records(runs: Sequence[Run], folder: Path) -> BySpec:
    """Read the records of these runs, by spec and seed. A spec without records has an empty entry."""
    found: BySpec = {run.spec: {} for run in runs}
    for run in runs:
        if (record := run.load(folder)) is not None:
            found[run.spec][run.seed] = record
    return found


def commits_of(found: BySpec) -> set[str]:
    """Return the commits at which records were made."""
    return {str(record["commit"]) for by_seed in found.values() for record in by_seed.values()}


def complete(runs: Sequence[Run], folder: Path, jobs: int, work: Callable[[Run], float] = lambda run: 1.0) -> None:
    """Perform the missing runs in `jobs` processes of one thread each. `work`: how long a run takes, in any unit."""
    missing = [run for run in runs if run.load(folder) is None]
    finished, left = len(runs) - len(missing), TimeLeft(map(work, missing))
    print(f"{len(runs)} runs, {finished} of them finished", flush=True)
    with termination_interrupts():
        for run, record in (_in_processes if jobs > 1 else _here)(missing, folder, jobs, machine.commit()):
            finished += 1
            outcome = f"{run.task}  {run.spec}  seed {run.seed}  loss {record['losses'][-1]}  score {record['score']:.2f}"
            print(f"run {finished} of {len(runs)}  {outcome}  {record['seconds']:.0f} s, {left.after(work(run))}", flush=True)


def _here(runs: Sequence[Run], folder: Path, jobs: int, commit: str | None) -> Iterator[tuple[Run, Record]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for run in runs:
            yield run, perform(run, folder, commit)
    finally:
        torch.set_num_threads(threads)


def _in_processes(runs: Sequence[Run], folder: Path, jobs: int, commit: str | None) -> Iterator[tuple[Run, Record]]:
    for name, value in GLIBC_SETTINGS.items():
        os.environ.setdefault(name, value)
    spawned = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(runs) or 1), mp_context=spawned, initializer=_begin)
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
    """Prepare a worker: one thread; Ctrl-C goes to the process that started it, which ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
