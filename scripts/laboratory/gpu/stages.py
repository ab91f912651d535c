"""Stages with time limits, some side by side, the GPU and programs that they find, and the two files that they leave.

Each stage leaves a record with its name and outcome, and none keeps the others from running.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from laboratory import machine, report
from laboratory.machine import ROOT

Record = dict[str, Any]

# Folders that git ignores: the check's own, in it a copy of gradcomp with the extension for this GPU; and the parts that were
# prepared on another machine (packing).
BUILD, PACK = ROOT / "build" / "gpu", ROOT / "build" / "gpu-pack"
PACKAGE = BUILD / "package"

# Where CUDA's programs lie, if not on PATH. A star stands for a version.
CUDA_PLACES = ("usr/local/cuda/bin", "usr/local/cuda/compute-sanitizer", "opt/nvidia/nsight-compute/*")

# The status of a stage that has not ended.
RUNNING = "running"
# Recorded lines of a failed command.
TAIL = 20
# Seconds for a killed process to end. A process that hangs in a driver does not end, and must not hold up the other stages.
ENDING = 5


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
    """Find a program: on PATH, in the toolkit that CUDA_HOME names, or in one of CUDA's places."""
    home = os.environ.get("CUDA_HOME")
    folders = [Path(home) / "bin"] if home else []
    folders += [folder for place in CUDA_PLACES for folder in sorted(root.glob(place), reverse=True)]
    return shutil.which(name) or next((str(folder / name) for folder in folders if (folder / name).is_file()), None)


def toolkit() -> Path | None:
    """Find the folder of the CUDA toolkit. nvcc knows it: the nvcc on PATH may be a script that lies elsewhere."""
    nvcc = program("nvcc")
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, timeout=30).stderr
    found = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return Path(found[1]).resolve() if found else Path(nvcc).resolve().parents[1]


def environment() -> dict[str, str]:
    """Return variables by which every command finds the builds of the check before installed packages, and the laboratory."""
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(PACKAGE), str(ROOT / "scripts"), before]))
    variables = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if home := toolkit():
        programs = os.pathsep.join([os.environ.get("PATH", ""), str(home / "bin")])
        variables |= {"CUDA_HOME": str(home), "CUDACXX": str(home / "bin" / "nvcc"), "PATH": programs}
    return variables


def _is_clean(commit: str | None) -> bool:
    return commit is not None and not commit.endswith("-dirty")


def prepared() -> Record:
    """Return the note of all that was prepared on another machine; empty if nothing was."""
    note = PACK / "note.json"
    found: Record = json.loads(note.read_text()) if note.is_file() else {}
    return found


class Impossible(Exception):
    """A stage that this machine cannot run. The message names what is missing."""


class Failed(Exception):
    """A stage that ran and went wrong, or reached its limit. figures: those that it has all the same."""

    def __init__(self, reason: str, figures: Record | None = None):
        super().__init__(reason)
        self.figures = figures


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
        self._end, self.log, self.environment = end, log, environment
        self._process: subprocess.Popen[bytes] | None = None

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._end - time.monotonic()

    def stop(self) -> None:
        """End the command that runs, and start no other."""
        self._end = 0.0
        if self._process and self._process.poll() is None:
            _kill(self._process)

    def command(self, words: Sequence[str | Path], cwd: Path | None = None, **variables: str) -> str:
        """Run a command and return its output. Raise Failed if it does not succeed in time. Leave no process of it."""
        name = Path(words[0]).name
        if self.left() <= 0:
            raise Failed(f"no time was left for {name}")
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(map(str, words))}\n".encode())
            log.flush()  # before the command writes to the same file
            begin = log.tell()
            self._process = process = subprocess.Popen(
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
                _kill(process)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=ENDING)
        said = self.log.read_bytes()[begin:].decode(errors="replace")
        if how:
            raise Failed("\n".join([f"{name} {how}", *said.splitlines()[-TAIL:]]))
        return said


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def marked(text: str, mark: str = "@") -> Record:
    """Return the JSON after the mark, wherever a launcher put it in its line."""
    for line in text.splitlines():
        if f"{mark}{{" in line:
            found: Record = json.loads(line.partition(mark)[2])
            return found
    raise Failed(f"no result was printed\n{text[-2000:]}")


def attempt(record: Record, part: str, known: Record, measure: Callable[[], Record], out: Path | None) -> None:
    """Add what is measured, or its error, to a part of a record, and write that. out: where; None on ranks but the first."""
    try:
        found = measure()
    except Exception as error:  # the others have their turn
        found = {"error": f"{type(error).__name__}: {error}"}
    record[part].append({**known, **found})
    if out:
        print(json.dumps(record[part][-1]), flush=True)
        report.write(out, record)


def run(
    groups: Sequence[Sequence[Stage]],
    total: float,
    log: Path,
    environment: Mapping[str, str],
    after: Callable[[list[Record]], object],
) -> list[Record]:
    """Run all stages in order, those of a group side by side, within `total` seconds.

    after() gets the records so far before and after each stage: the last one is that of the stage that has just ended.
    """
    log.write_text("")
    records: list[Record] = []
    lacking = ""
    end = time.monotonic() + total
    for stages in groups:
        open_ones = {stage.name: {"name": stage.name, "status": RUNNING} for stage in stages}
        after([*records, *open_ones.values()])  # remains if the whole call is ended
        now = time.monotonic()
        logs = [log.with_name(f"{log.stem}-{stage.name}.log") for stage in stages]
        clocks = [Clock(min(now + stage.limit, end), own, environment) for stage, own in zip(stages, logs, strict=True)]
        with ThreadPoolExecutor(len(stages)) as side_by_side:
            started = [side_by_side.submit(_record, *each, log, lacking) for each in zip(stages, clocks, strict=True)]
            try:
                for ended in as_completed(started):
                    record = ended.result()
                    del open_ones[record["name"]]
                    records.append(record)
                    after([*records[:-1], *open_ones.values(), record])
            finally:
                for clock in clocks:  # after Ctrl-C none goes on
                    clock.stop()
        wrong = {record["name"] for record in records if record["status"] != "ok"}
        lacking = lacking or next((stage.name for stage in stages if stage.required and stage.name in wrong), "")
    return records


def _record(stage: Stage, clock: Clock, log: Path, lacking: str) -> Record:
    """Run a stage, and return its record. Its commands write to a log of its own, which then goes to the end of the call's."""
    began = time.monotonic()
    clock.log.write_text(f"=== {stage.name}\n")
    try:
        record = _outcome(stage, clock, lacking)
    finally:
        with log.open("ab") as opened:
            opened.write(clock.log.read_bytes())
        clock.log.unlink()
    return {"name": stage.name, **record, "seconds": round(time.monotonic() - began, 1)}


def _outcome(stage: Stage, clock: Clock, lacking: str) -> Record:
    if lacking:
        return {"status": "impossible", "reason": f"it needs the stage {lacking}, which is not ok"}
    try:
        return {"status": "ok", "figures": stage.run(clock)}
    except (Impossible, Failed) as error:
        figures = getattr(error, "figures", None)
        return {"status": type(error).__name__.lower(), "reason": str(error), **({"figures": figures} if figures else {})}
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
        origin = machine.origin(f"scripts/gpu_check {self._call}" + ("" if self._found else " --dry-run"))
        content = {
            "what": "gpu_check",
            "call": self._call,
            "device": self._found._asdict() if self._found else {"name": "none: a dry run on the CPU, no result of a GPU"},
            **origin,
            # A checkout without .git has none, and files that were carried there are changes of an older one.
            "commit": origin["commit"] if _is_clean(origin["commit"]) else prepared().get("commit", origin["commit"]),
            "versions": machine_figures.get("versions", {}),
            "stages": [*records],
        }
        text = json.dumps(content)
        for folder, name in ((ROOT, "."), (Path(sys.prefix), "PYTHON"), (Path.home(), "HOME")):
            text = text.replace(f"{folder}/", f"{name}/")
        report.write(self.result, json.loads(text))
        say(records)


def say(records: Sequence[Record]) -> None:
    """Print how the last stage ended, unless it runs."""
    last = records[-1]
    if last["status"] == RUNNING:
        return
    print(f"{last['name']:<17} {last['status']:<10} {last['seconds']:>6.1f} s", flush=True)
    for text in (last.get("reason"), *last.get("figures", {}).get("said", ())):
        if text:
            print("  " + text.replace("\n", "\n  "), flush=True)
