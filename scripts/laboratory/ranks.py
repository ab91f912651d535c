"""Real ranks, from both sides: the command that starts a job on them, their progress and their result."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from laboratory.machine import ROOT
from laboratory.report import Progress

SCRIPTS = ROOT / "scripts"

# Beginnings of rank 0's lines that are meant for the program that started it.
PROGRESS, RESULT = "@progress ", "@result "

# Lines of a failed job that are repeated.
TAIL = 60

# Glibc decides by the order of frees whether a step gives gradients back to the system, which costs some 10 ms of page faults;
# arrays above 32 MB it always gives back. With these settings it never does.
GLIBC_SETTINGS = {"MALLOC_TRIM_THRESHOLD_": str(1 << 36), "MALLOC_MMAP_MAX_": "0"}


class RanksFailed(RuntimeError):
    """The ranks failed, or ended without a result."""


def command(
    launcher: str, count: int, job: Sequence[str], rate: str = "1gbit", door: str = "horovod", later: Sequence[str] = ()
) -> list[str]:
    """Write the command that runs a job on `count` ranks.

    launcher: cluster (an emulated host each, links of this rate), horovodrun or torchrun (all on this machine).
    job: a module of the laboratory and its arguments. door: whose ranks they are on a cluster: horovod's, or torch's.
    later: more options of the cluster.
    """
    python, module = sys.executable, ["-m", *job]
    if launcher == "torchrun":
        return [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *module]
    if launcher == "horovodrun":
        return [python, "-m", "horovod.runner.launch", "-np", str(count), python, *module]
    return [*on_cluster(count, rate, door, later), python, *module]


def on_cluster(hosts: int, rate: str, door: str = "horovod", later: Sequence[str] = ()) -> list[str]:
    """Write the beginning of a command that runs on each of some emulated hosts, and shows rank 0's output."""
    options = ["--hosts", str(hosts), "--rate", rate, "--output", "0", *later]
    if door != "horovod":
        options += ["--launcher", "torch"]
    return [sys.executable, str(SCRIPTS / "cluster"), *options, "--"]


def environment(count: int, **variables: str) -> dict[str, str]:
    """Return this process's variables, with the cores shared out to the ranks and the laboratory on the path."""
    path = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
    threads = str(max(1, len(os.sched_getaffinity(0)) // count))
    defaults = {**GLIBC_SETTINGS, "OMP_NUM_THREADS": threads, **os.environ}
    return {**defaults, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **variables}


def run(words: Sequence[str], variables: Mapping[str, str], label: str, log: Path | None = None) -> dict[str, Any]:
    """Run a job and return rank 0's result. `label` begins each line of progress. log: for all other output."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with contextlib.ExitStack() as opened:
        sink = opened.enter_context(log.open("w")) if log else None
        opened.enter_context(termination_interrupts())
        try:
            # In a session of its own: Ctrl-C of a terminal goes to all programs of its session, and launchers that are only
            # beginning leave their ranks running then.
            process = opened.enter_context(subprocess.Popen(words, env=variables, start_new_session=True, **pipes))
        except OSError as error:
            raise RanksFailed(f"the ranks could not be started: {error}; run scripts/setup first") from None
        assert process.stdout is not None
        try:
            result, tail = listen(process.stdout, Progress(), label, sink)
            status = process.wait()
        except BaseException:
            process.terminate()
            raise
    if status == 0 and result is not None:
        return result
    sys.stderr.writelines(tail)
    where = f"all output is in {log}" if log else "their last lines are above"
    raise RanksFailed(f"the ranks of {label} failed with status {status}; {where}")


@contextlib.contextmanager
def termination_interrupts() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C: by default it would end this process at once and leave the ranks running."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def listen(
    lines: Iterable[str], progress: Progress, label: str, log: TextIO | None = None
) -> tuple[dict[str, Any] | None, list[str]]:
    """Show progress; return the result, and the last lines that are neither."""
    result = None
    tail: collections.deque[str] = collections.deque(maxlen=TAIL)
    for line in lines:
        if RESULT in line:
            result = json.loads(line.partition(RESULT)[2])
        elif PROGRESS in line:
            share, text = json.loads(line.partition(PROGRESS)[2])
            progress(f"{label}: {text}", share)
        else:
            tail.append(line)
            if log:
                log.write(line)
                log.flush()
    progress.end()
    return result, list(tail)


def tell(text: str, share: float | None = None) -> None:
    """Say how far the job is. To be called by rank 0 alone."""
    print(PROGRESS + json.dumps([share, text]), flush=True)


def report(result: Mapping[str, Any]) -> None:
    """Hand over the result. To be called by rank 0 alone."""
    print(RESULT + json.dumps(result), flush=True)
