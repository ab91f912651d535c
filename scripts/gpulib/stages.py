"""Stages with time limits: each is recorded by name with what came of it, and none keeps the others from running."""

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
TAIL = 20  # lines of a failed command that are kept


class Impossible(Exception):
    """This machine lacks what the stage needs; the message says what."""


class Failed(Exception):
    """The stage ran and went wrong."""


class TimedOut(Exception):
    """The stage's time was over."""


@dataclass(frozen=True)
class Stage:
    """run(clock) returns the stage's figures, or raises one of the above. needs: stages that must have gone well before."""

    name: str
    run: Callable[[Clock], Record]
    limit: float
    needs: tuple[str, ...] = ()

    def among(self, names: Collection[str]) -> Stage:
        """The same stage where only these are run: what it needs beside them is taken to be there."""
        return replace(self, needs=tuple(name for name in self.needs if name in names))


@dataclass
class Clock:
    """The time that a stage has left; commands run under it."""

    end: float
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def left(self) -> float:
        return self.end - time.monotonic()

    def command(self, words: Sequence[str | Path], cwd: Path | None = None, **variables: str) -> str:
        """Runs a command to its end and returns what it printed; Failed or TimedOut otherwise. Nothing of it stays behind."""
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
                process.wait()
        if process.returncode != 0:
            raise Failed(f"{Path(words[0]).name} ended with {process.returncode}\n{self._tail(begin)}")
        return self._since(begin)

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
    """All stages in order, within `total` seconds; after() sees the records so far whenever one is done."""
    logs.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    end = time.monotonic() + total
    for stage in stages:
        began = time.monotonic()
        log = logs / f"{stage.name.replace(' ', '-')}.log"
        log.write_bytes(b"")
        clock = Clock(min(began + stage.limit, end), log, environment)
        records.append({"name": stage.name, **_outcome(stage, clock, records), "seconds": round(time.monotonic() - began, 1)})
        after(records)
    return records


def _outcome(stage: Stage, clock: Clock, before: Sequence[Record]) -> Record:
    gone_well = {record["name"] for record in before if record["status"] == "ok"}
    lacking = [name for name in stage.needs if name not in gone_well]
    if lacking:
        return {"status": "impossible", "reason": f"it needs the stage {', '.join(lacking)}, which did not go well"}
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
    except Exception as error:  # whatever it is, the other stages have their turn
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
