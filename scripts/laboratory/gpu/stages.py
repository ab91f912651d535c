"""Stages with time limits. Each leaves a record with its name and outcome, and none keeps the others from running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laboratory import machine
from laboratory.gpu.place import Gpu
from laboratory.report import results

Record = dict[str, Any]

# The status of a stage that has not ended.
RUNNING = "running"
# Recorded lines of a failed command.
TAIL = 20
# Seconds for a killed process to end. A process that hangs in a driver does not end, and must not hold up the other stages.
ENDING = 10


class Impossible(Exception):
    """A stage that this machine cannot run. The message names what is missing."""


class Failed(Exception):
    """A stage that ran and went wrong."""


class TimedOut(Exception):
    """A stage that reached its limit."""


STATUS: dict[type[Exception], str] = {Impossible: "impossible", TimedOut: "timed out", Failed: "failed"}


@dataclass(frozen=True)
class Stage:
    """A stage. run(clock) returns its figures, or raises one of the above. required: without it, later stages cannot run."""

    name: str
    run: Callable[[Clock], Record]
    limit: float
    required: bool = False


class Clock:
    """The time that is left to a stage, and the commands that run under it. They write to the end of the log."""

    def __init__(self, end: float, log: Path, environment: Mapping[str, str]):
        self._end, self._log, self.environment = end, log, environment
        self._begin = log.stat().st_size

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._end - time.monotonic()

    def command(self, words: Sequence[str | Path], cwd: Path | None = None, **variables: str) -> str:
        """Run a command and return its output. Raise Failed or TimedOut if it does not succeed. Leave no process of it."""
        name = Path(words[0]).name
        if self.left() <= 0:
            raise TimedOut(f"no time was left for {name}")
        with self._log.open("ab") as log:
            log.write(f"$ {' '.join(map(str, words))}\n".encode())
            log.flush()  # before the command writes to the same file
            begin = log.tell()
            process = subprocess.Popen(
                list(map(str, words)),
                cwd=cwd,
                env={**os.environ, **self.environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(timeout=self.left())
            except subprocess.TimeoutExpired:
                raise TimedOut(f"{name} was ended at the stage's limit\n{self._tail(begin)}") from None
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=ENDING)
        if process.returncode != 0:
            raise Failed(f"{name} ended with {process.returncode}\n{self._tail(begin)}")
        return self._since(begin)

    def output(self) -> str:
        """Return all that the stage's commands have said."""
        return self._since(self._begin)

    def _since(self, begin: int) -> str:
        return self._log.read_bytes()[begin:].decode(errors="replace")

    def _tail(self, begin: int) -> str:
        return "\n".join(self._since(begin).splitlines()[-TAIL:])


def run(
    stages: Sequence[Stage], total: float, log: Path, environment: Mapping[str, str], after: Callable[[list[Record]], object]
) -> list[Record]:
    """Run all stages in order, within `total` seconds. after() gets the records so far before and after each stage."""
    log.write_text("")
    records: list[Record] = []
    lacking = ""
    end = time.monotonic() + total
    for stage in stages:
        began = time.monotonic()
        with log.open("a") as opened:
            opened.write(f"=== {stage.name}\n")
        clock = Clock(min(began + stage.limit, end), log, environment)
        after([*records, {"name": stage.name, "status": RUNNING}])  # remains if the whole call is ended
        record = _outcome(stage, clock, lacking)
        if stage.required and record["status"] != "ok":
            lacking = lacking or stage.name
        records.append({"name": stage.name, **record, "seconds": round(time.monotonic() - began, 1)})
        after(records)
    return records


def _outcome(stage: Stage, clock: Clock, lacking: str) -> Record:
    if lacking:
        return {"status": "impossible", "reason": f"it needs the stage {lacking}, which is not ok"}
    if clock.left() <= 0:
        return {"status": "timed out", "reason": "the time for the whole check was over before its turn"}
    try:
        return {"status": "ok", "figures": stage.run(clock)}
    except (Impossible, Failed, TimedOut) as error:
        return {"status": STATUS[type(error)], "reason": str(error)}
    except Exception as error:  # the other stages have their turn
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


class Output:
    """The two files of a call: its result, written anew before and after each stage, and its log.

    found: the GPU; None in a dry run. say: prints a line.
    """

    def __init__(self, folder: Path, call: str, found: Gpu | None, say: Callable[[str], object] = print):
        stem = f"gpu-{machine.slug(found.name)}-{call}" if found else f"dry-run-{call}"
        self.result, self.log = folder / f"{stem}.json", folder / f"{stem}.log"
        self._call, self._found, self._say = call, found, say
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, records: Sequence[Record]) -> None:
        """Write the result without the folders of the machine, and say how the last stage ended."""
        machine_figures: Record = records[0].get("figures", {})
        content = {
            "what": "gpu_check",
            "call": self._call,
            "device": self._found._asdict() if self._found else {"name": "none: a dry run on the CPU, no result of a GPU"},
            **machine.origin(f"scripts/gpu_check {self._call}" + ("" if self._found else " --dry-run")),
            "versions": machine_figures.get("versions", {}),
            "stages": [*records],
        }
        text = json.dumps(content)
        for folder, name in ((machine.ROOT, "."), (Path(sys.prefix), "PYTHON"), (Path.home(), "HOME")):
            text = text.replace(f"{folder}/", f"{name}/")
        results.write(self.result, json.loads(text))
        last = records[-1]
        if last["status"] != RUNNING:
            self._say(f"{last['name']:<17} {last['status']:<10} {last['seconds']:>6.1f} s")
            if "reason" in last:
                self._say("  " + last["reason"].replace("\n", "\n  "))
