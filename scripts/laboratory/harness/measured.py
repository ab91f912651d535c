"""Two measurements, a training by one way and rounds in which ways take turns; their records, and the loop that completes them.

A record is a file with the key of what was measured, which decides the outcome, its origin, and figures.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from laboratory import machine, ranks, report
from laboratory.harness import rounds, simulated
from laboratory.harness.ways import HOROVOD, SIMULATED, TIMED
from laboratory.tasks import table
from laboratory.tasks.task import Settings

Record = dict[str, Any]

# The name of a key in older records of rounds, and what these keys held that today's do not.
OLDER_KEY, OLDER_SETTINGS = "launch", ("predicts", "processor")

# How ranks on this machine alone are started, by door.
LAUNCHERS = {**dict.fromkeys(TIMED, "torchrun"), HOROVOD: "horovodrun"}


class Training(NamedTuple):
    """Everything but the code that decides the outcome of a training.

    door: of real ranks; simulated ranks have none. data: the name of the prepared file. rate: of the links of an emulated
    cluster; real ranks without one are processes of this machine.
    """

    task: str
    way: str
    seed: int
    ranks: int
    settings: Settings
    door: str = SIMULATED
    data: str = ""
    rate: str = ""

    def key(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        own = {name: value for name, value in self._asdict().items() if self._field_defaults.get(name) != value}
        return {**own, "settings": self.settings.key()}

    def stem(self) -> str:
        """Return the first part of the record's name."""
        return f"{self.task}-{machine.slug(self.way)[:80]}-{self.ranks}-ranks"

    def label(self) -> str:
        """Name it in a line of progress."""
        return f"{self.task}  {self.way}  seed {self.seed}"


class Rounds(NamedTuple):
    """Everything but the code that decides step times: ranks, links, and the rounds in which each way takes a turn.

    steps, turn: of a turn, at most; its seconds. later: the rate that the links get after so many seconds, if they change.
    """

    launcher: str
    hosts: int
    rate: str
    task: str
    settings: Settings
    ways: Sequence[str]
    rounds: int
    steps: int
    turn: float = 1e9
    door: str = HOROVOD
    later: tuple[str, float] | None = None
    data: str = ""

    def key(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**self._asdict(), "settings": self.settings.key()}

    def stem(self) -> str:
        """Return the first part of the record's name."""
        return f"{self.task}-{self.door}-{self.hosts}-hosts-{self.rate}-width-{self.settings.width}"

    def label(self) -> str:
        """Name it in a line of progress."""
        return f"{self.hosts} hosts, {self.rate}, {self.task} by {self.door}"


Measured = Training | Rounds


class Lab(NamedTuple):
    """Where work is done. data: the folder of prepared data. jobs: simulations at once."""

    command: str
    data: Path
    jobs: int = 1


def command(measured: Measured, data: Path) -> list[str]:
    """Write the command of its ranks."""
    own = {**measured._asdict(), "settings": measured.settings._asdict()}
    if measured.data:
        own["data"] = str(table.place(data, measured.data))
    job = ["laboratory.harness.rank", type(measured).__name__, json.dumps(own)]
    if isinstance(measured, Training):
        launcher = "cluster" if measured.rate else LAUNCHERS[measured.door]
        return ranks.command(launcher, measured.ranks, job, measured.rate, measured.door)
    later = ["--later", "{}:{:g}".format(*measured.later)] if measured.later else []
    return ranks.command(measured.launcher, measured.hosts, job, measured.rate, measured.door, later)


def perform(measured: Measured, lab: Lab) -> dict[str, Any]:
    """Measure, and return the figures."""
    if isinstance(measured, Training) and measured.door == SIMULATED:
        return simulated.train(measured, lab.data)
    count = measured.ranks if isinstance(measured, Training) else measured.hosts
    raw = ranks.run(command(measured, lab.data), ranks.environment(count), measured.label())
    return raw if isinstance(measured, Training) else rounds.summary(raw, measured.later is not None)


def load(measured: Measured, folder: Path) -> Record | None:
    """Find the record; None if there is none."""
    wanted = json.loads(json.dumps(measured.key()))
    return next((record for record in records(folder, measured.stem()) if record["key"] == wanted), None)


def records(folder: Path, stem: str = "") -> Iterator[Record]:
    """Read the records of a folder whose files' names begin so, in today's form."""
    for path in sorted(folder.glob(f"{stem}*.json")):
        record = report.read(path)
        if OLDER_KEY in record:
            key = {of: value for of, value in record.pop(OLDER_KEY).items() if of not in OLDER_SETTINGS}
            record = {"key": key, **record.pop("run", {}), **record}
        yield record


def keep(measured: Measured, folder: Path, lab: Lab) -> Record:
    """Measure, and write the record."""
    figures, key = perform(measured, lab), measured.key()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    record = {"what": type(measured).__name__.lower(), **machine.origin(lab.command), "key": key, **figures}
    report.write(folder / f"{measured.stem()}-{digest}.json", record)
    return record


def complete(every: Sequence[Measured], folder: Path, lab: Lab) -> None:
    """Measure what has no record. Simulations share the cores as `lab.jobs` says; real ranks need them alone."""
    missing = [each for each in every if load(each, folder) is None]
    finished, began = len(every) - len(missing), time.monotonic()
    print(f"{len(every)} measurements, {finished} of them finished", flush=True)
    alone = [each for each in missing if lab.jobs == 1 or isinstance(each, Rounds) or each.door != SIMULATED]
    shared = [each for each in missing if each not in alone]
    with ranks.termination_interrupts():
        ended = itertools.chain(_simulations(shared, folder, lab), ((each, keep(each, folder, lab)) for each in alone))
        for done, (each, record) in enumerate(ended, 1):
            score = f"  score {record['scores'][-1][2]:.2f}" if isinstance(each, Training) else ""
            left = (time.monotonic() - began) / done * (len(missing) - done) / 60
            print(f"{finished + done} of {len(every)}  {each.label()}{score}, {left:.0f} min left", flush=True)


def _simulations(every: Sequence[Measured], folder: Path, lab: Lab) -> Iterator[tuple[Measured, Record]]:
    for name, value in ranks.GLIBC_SETTINGS.items():
        os.environ.setdefault(name, value)
    workers, spawned = min(lab.jobs, len(every)) or 1, multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawned, _begin)
    try:
        waiting = {pool.submit(keep, each, folder, lab): each for each in every}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Prepare a worker: Ctrl-C goes to the process that started it, which ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
