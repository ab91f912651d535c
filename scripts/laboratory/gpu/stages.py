"""Stages with time limits. Each leaves a record with its name and outcome, and none keeps the others from running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Record = dict[str, Any]

# The status of a stage that has not ended.
RUNNING = "running"
# Recorded lines of a failed command.
TAIL = 20
# Seconds for a killed process to end. One that hangs in a driver does not, and must not keep the other stages waiting.
ENDING = 10


class Impossible(Exception):
    """A stage that this machine cannot run. The message names what is missing."""


class Failed(Exception):
    """A stage that ran and went wrong."""


class TimedOut(Exception):
    """A stage that reached its limit."""


@dataclass(frozen=True)
class Stage:
    """A stage. run(clock) returns its figures, or raises one of the above. needs: stages that must have gone well before."""

    name: str
    run: Callable[[Clock], Record]
    limit: float
    needs: tuple[str, ...] = ()

    def among(self, names: Collection[str]) -> Stage:
        """Return the stage for a run of these stages alone. Others that it needs are taken to have gone well."""
        return replace(self, needs=tuple(name for name in self.needs if name in names))


@dataclass
class Clock:
    """The time that is left to a stage, and the commands that run under it."""

    end: float
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.end - time.monotonic()

    def command(self, words: Sequence[str | Path], cwd: Path | None = None, **variables: str) -> str:
        """Run a command and return its output. Raise Failed or TimedOut if it does not succeed. Leave no process of it."""
        if self.left() <= 0:
            raise TimedOut(f"no time was left for {Path(words[0]).name}")
        environment = {**os.environ, **self.environment, **variables}
        with self.log.open("a+b") as log:
            log.write(f"$ {' '.join(map(str, words))}\n".encode())
            log.flush()  # before the command writes to the same file
            begin = log.tell()
            process = subprocess.Popen(
                list(map(str, words)),
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(timeout=self.left())
            except subprocess.TimeoutExpired:
                raise TimedOut(f"{Path(words[0]).name} was ended at the stage's limit\n{self._tail(begin)}") from None
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=ENDING)
        if process.returncode != 0:
            raise Failed(f"{Path(words[0]).name} ended with {process.returncode}\n{self._tail(begin)}")
        return self._since(begin)

    def output(self) -> str:
        """Return all that the stage's commands have said."""
        return self._since(0)

    def _since(self, begin: int) -> str:
        with self.log.open("rb") as log:
            log.seek(begin)
            return log.read().decode(errors="replace")

    def _tail(self, begin: int) -> str:
        return "\n".join(self._since(begin).splitlines()[-TAIL:])


def run(
    stages: Sequence[Stage],
    total: float,
    logs: Path,
    environment: Mapping[str, str],
    after: Callable[[list[Record]], object] = lambda records: None,
) -> list[Record]:
    """Run all stages in order, within `total` seconds. after() gets the records so far before and after each stage."""
    logs.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    end = time.monotonic() + total
    for stage in stages:
        began = time.monotonic()
        log = logs / log_name(stage.name)
        log.write_bytes(b"")
        clock = Clock(min(began + stage.limit, end), log, environment)
        after([*records, {"name": stage.name, "status": RUNNING}])  # what remains if the whole call is ended
        records.append({"name": stage.name, **_outcome(stage, clock, records), "seconds": round(time.monotonic() - began, 1)})
        after(records)
    return records


def log_name(stage: str) -> str:
    """Name the file of a stage's log."""
    return f"{stage.replace(' ', '-')}.log"


def _outcome(stage: Stage, clock: Clock, before: Sequence[Record]) -> Record:
    gone_well = {record["name"] for record in before if record["status"] == "ok"}
    lacking = [name for name in stage.needs if name not in gone_well]
    if lacking:
        return {"status": "impossible", "reason": f"it needs the stage {', '.join(lacking)}, which is not ok"}
    if clock.left() <= 0:
        return {"status": "timed out", "reason": "the time for the whole check was over before its turn"}
    try:
        return {"status": "ok", "figures": stage.run(clock)}
    except Impossible as error:
        return {"status": "impossible", "reason": str(error)}
    except TimedOut as error:
        return {"status": "timed out", "reason": str(error)}
    except Failed as error:
        return {"status": "failed", "reason": str(error)}
    except Exception as error:  # the other stages have their turn
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
