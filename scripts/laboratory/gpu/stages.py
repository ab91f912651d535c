"""Stages with time limits, the GPU and programs that they find, and the two files that they leave.

Each stage leaves a record with its name and outcome, and none keeps the others from running.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from laboratory import machine, report
from laboratory.machine import ROOT

Record = dict[str, Any]

# Folders that git ignores: a copy of gradcomp with the extension for this GPU, and a Horovod that was carried along, if any.
BUILD = ROOT / "build" / "gpu"
PACKAGE, HOROVOD = BUILD / "package", ROOT / "build" / "gpu-horovod"

# Where CUDA's programs lie, if not on PATH. A star stands for a version.
CUDA_PLACES = ("usr/local/cuda/bin", "usr/local/cuda/compute-sanitizer", "opt/nvidia/nsight-compute/*")

# The status of a stage that has not ended.
RUNNING = "running"
# Recorded lines of a failed command.
TAIL = 20
# Seconds for a killed process to end. A process that hangs in a driver does not end, and must not hold up the other stages.
ENDING = 10


class Gpu(NamedTuple):
    """A GPU as nvidia-smi describes it."""

    name: str
    driver: str
    capability: str
    memory: str

    @property
    def arch(self) -> str:
        """Return the architecture as CMake and nvcc number it."""
        return self.capability.replace(".", "")


def find_gpu(program: str = "nvidia-smi") -> Gpu | None:
    """Find the first GPU of this machine."""
    words = [program, "--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    fields = [part.strip() for part in done.stdout.partition("\n")[0].split(",")]
    return Gpu(*fields) if done.returncode == 0 and len(fields) == 4 else None


def program(name: str, root: Path = Path("/")) -> str | None:
    """Find a program: on PATH, beside the toolkit that CUDA_HOME names, or in one of CUDA's places."""
    home = os.environ.get("CUDA_HOME")
    folders = [Path(home) / "bin"] if home else []
    folders += [folder for place in CUDA_PLACES for folder in sorted(root.glob(place), reverse=True)]
    return shutil.which(name) or next((str(folder / name) for folder in folders if (folder / name).is_file()), None)


def environment() -> dict[str, str]:
    """Return variables by which every command finds the builds of the check before installed packages, and the laboratory."""
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(PACKAGE), str(HOROVOD), str(ROOT / "scripts"), before]))
    variables = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if nvcc := program("nvcc"):
        variables |= {"CUDACXX": nvcc, "PATH": os.pathsep.join([os.environ.get("PATH", ""), str(Path(nvcc).parent)])}
    return variables


class Impossible(Exception):
    """A stage that this machine cannot run. The message names what is missing."""


class Failed(Exception):
    """A stage that ran and went wrong, or reached its limit."""


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

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._end - time.monotonic()

    def command(self, words: Sequence[str | Path], cwd: Path | None = None, **variables: str) -> str:
        """Run a command and return its output. Raise Failed if it does not succeed in time. Leave no process of it."""
        name = Path(words[0]).name
        if self.left() <= 0:
            raise Failed(f"no time was left for {name}")
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
                how = f"ended with {process.returncode}" if process.returncode else ""
            except subprocess.TimeoutExpired:
                how = "was ended at the stage's limit"
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=ENDING)
        said = self._log.read_bytes()[begin:].decode(errors="replace")
        if how:
            raise Failed("\n".join([f"{name} {how}", *said.splitlines()[-TAIL:]]))
        return said


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
    try:
        return {"status": "ok", "figures": stage.run(clock)}
    except (Impossible, Failed) as error:
        return {"status": type(error).__name__.lower(), "reason": str(error)}
    except Exception as error:  # the other stages have their turn
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


class Output:
    """The two files of a call: its result, written anew before and after each stage, and its log.

    found: the GPU; None in a dry run.
    """

    def __init__(self, folder: Path, call: str, found: Gpu | None):
        stem = f"gpu-{machine.slug(found.name)}-{call}" if found else f"dry-run-{call}"
        self.result, self.log = folder / f"{stem}.json", folder / f"{stem}.log"
        self._call, self._found = call, found
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
        for folder, name in ((ROOT, "."), (Path(sys.prefix), "PYTHON"), (Path.home(), "HOME")):
            text = text.replace(f"{folder}/", f"{name}/")
        report.write(self.result, json.loads(text))
        last = records[-1]
        if last["status"] != RUNNING:
            print(f"{last['name']:<17} {last['status']:<10} {last['seconds']:>6.1f} s", flush=True)
            if "reason" in last:
                print("  " + last["reason"].replace("\n", "\n  "), flush=True)
