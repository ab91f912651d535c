"""Courses: whole trainings on real ranks, each by one way to exchange gradients, kept as files when they are finished."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from laboratory import machine, ranks
from laboratory.report import results
from laboratory.report.progress import TimeLeft
from laboratory.tasks import prepared
from laboratory.tasks.task import Settings
from laboratory.train import ways

LAUNCHERS = {ways.HOROVOD: "horovodrun", ways.DDP: "torchrun"}

Record = dict[str, Any]


class Course(NamedTuple):
    """Everything but the code that decides the outcome of a course.

    every: batches between two scores. rate: of the links of an emulated cluster; "" trains on ranks of this machine alone.
    """

    task: str
    way: str
    door: str
    seed: int
    ranks: int
    settings: Settings
    every: int
    data: str = ""
    rate: str = ""

    def key(self) -> dict[str, Any]:
        """Return it as JSON."""
        found = {**self._asdict(), "settings": self.settings.key()}
        return found if self.rate else {name: value for name, value in found.items() if name != "rate"}

    def path(self, folder: Path) -> Path:
        """Name the file of its record."""
        return results.kept(folder / "courses", f"{self.task}-{machine.slug(self.way)}-{self.ranks}-ranks", self.key())

    def load(self, folder: Path) -> Record | None:
        """Read its record; None if the course is not finished."""
        return results.read(self.path(folder))

    def command(self, prepared_in: Path) -> list[str]:
        """Write the command of its ranks. prepared_in: the folder of prepared data."""
        launcher = "cluster" if self.rate else LAUNCHERS[self.door]
        words = [f"--door={self.door}", f"--task={self.task}", f"--settings={json.dumps(self.settings._asdict())}"]
        words += [f"--seed={self.seed}", f"--every={self.every}"]
        if self.data:
            words.append(f"--data={prepared.place(prepared_in, self.data)}")
        return ranks.command(launcher, self.ranks, ["laboratory.train.course", *words, self.way], self.rate, self.door)


def perform(course: Course, folder: Path, data: Path, projects: Path | None) -> Record:
    """Train, and write the record. data: the folder of prepared data."""
    variables = ranks.environment(course.ranks, **ways.environment(projects))
    result = ranks.run(course.command(data), variables, f"{course.task}  {course.way}")
    record = {"course": course.key(), "commit": machine.commit(), **result}
    results.write(course.path(folder), record)
    return record


def complete(courses: Sequence[Course], folder: Path, data: Path, projects: Path | None) -> None:
    """Train what is missing, one course after the other."""
    missing = [course for course in courses if course.load(folder) is None]
    left = TimeLeft(course.settings.steps for course in missing)
    print(f"{len(courses)} trainings, {len(courses) - len(missing)} of them finished", flush=True)
    for done, course in enumerate(missing, len(courses) - len(missing) + 1):
        record = perform(course, folder, data, projects)
        outcome = f"{course.task}  {course.way}  seed {course.seed}  lr {course.settings.lr:g}  {record['scores'][-1][2]:.2f}"
        print(f"training {done} of {len(courses)}  {outcome}, {left.after(course.settings.steps)}", flush=True)
