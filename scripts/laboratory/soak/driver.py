"""The driver of a soak: starts its ranks, pauses, kills and replaces some, and sees that none outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laboratory import ranks
from laboratory.ranks import RanksFailed
from laboratory.report.progress import Progress
from laboratory.soak.job import STOP

# The variable that marks every process of a soak.
MARK = "GRADCOMP_SOAK"

# Seconds: between two looks, of a rank's pause, between two pauses, until ranks that make no progress have failed, and until
# ended ranks must be gone.
LOOK = 0.1
PAUSE = (0.05, 2.0)
BETWEEN_PAUSES = (2.0, 8.0)
MOST_WITHOUT_PROGRESS = 180.0
UNTIL_GONE = 10.0

# Names of this machine, each of which Horovod takes for a host. It never returns to one where a process died.
HOSTS = ["localhost", "127.0.0.1", "127.1", "127.0.1"]
LATER_HOSTS = ["0x7f.1", "0x7f.0.1"]


class Driver:
    """The running ranks of one soak.

    folder: of logs and records. steps, seconds: the soak is over after either. troubles: what was done to the ranks, and when.
    lines: of all logs. left_over: processes that outlived their launcher.
    """

    def __init__(self, folder: Path, label: str, seed: int, steps: int, seconds: float):
        self.folder, self.label, self.steps, self._seconds = folder, label, steps, seconds
        self.random, self._progress = random.Random(f"{seed} trouble"), Progress()
        self.arguments = [str(folder), f"--seed={seed}", f"--steps={steps}"]
        self.lines: list[dict[str, Any]] = []
        self.troubles: list[dict[str, Any]] = []
        self.left_over = 0
        self._mark, self._step = uuid.uuid4().hex, 0
        self._began = self._moved = time.monotonic()
        self._read: dict[Path, int] = {}
        self._latest: dict[int, dict[str, Any]] = {}  # by process, over all its lines
        self._paused: int | None = None
        self._next_pause = self._began + self.random.uniform(*BETWEEN_PAUSES)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._output = folder / "output"
        self._process: subprocess.Popen[bytes]

    def kill_all(self) -> None:
        """Kill all that still runs, and what it starts meanwhile."""
        self._progress.end()
        until = time.monotonic() + UNTIL_GONE
        while (left := self._alive()) and time.monotonic() < until:
            for pid in left:
                _send(pid, signal.SIGKILL)
            time.sleep(LOOK)

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.monotonic() - self._began

    @property
    def share(self) -> float:
        """The share of the soak that is over, by steps or by time."""
        return max(self._step / self.steps, self.seconds / self._seconds)

    def start(self, words: Sequence[str], count: int, **variables: str) -> None:
        """Start a launcher with the job's ranks. All that they say goes to one file."""
        (self.folder / STOP).unlink(missing_ok=True)
        environment = ranks.environment(count, GLOO_SOCKET_IFNAME="lo", **{MARK: self._mark}, **variables)
        self._moved = time.monotonic()
        with self._output.open("ab") as file:
            self._process = subprocess.Popen(
                words, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def train_until(self, share: float, count: int) -> None:
        """Watch the ranks, and pause some, until this share is over and so many ranks have begun together and logged steps."""
        first, what = len(self.lines), f"{count} ranks were {share:.0%} through"
        while not (self.share >= share and self._have_trained(first, count)):
            if self._process.poll() is not None:
                self._fail(f"ended with status {self._process.returncode} before {what}")
            self._watch(f"made no step for {MOST_WITHOUT_PROGRESS:.0f} s before {what}")

    def _have_trained(self, first: int, count: int) -> bool:
        begun = {line["pid"]: line["time"] for line in self.lines[first:] if line.get("ranks") == count and "begins" in line}
        return len([pid for pid in begun if self._latest[pid]["time"] > begun[pid]]) >= count

    def end_ranks(self) -> None:
        """Ask the ranks to end after their next commit, and wait until their launcher has ended."""
        (self.folder / STOP).touch()
        while self._process.poll() is None:
            self._watch("were to end, and did not")
        if self._process.returncode != 0:
            self._fail(f"were to end, but have status {self._process.returncode}")
        until = time.monotonic() + UNTIL_GONE
        while (left := len(self._alive())) and time.monotonic() < until:
            time.sleep(LOOK)
        self.left_over += left

    def _watch(self, stuck: str) -> None:
        """Read what the ranks have logged, and pause one or let it go on. stuck: said where they stand still."""
        if time.monotonic() - self._moved > MOST_WITHOUT_PROGRESS:
            self._fail(stuck)
        time.sleep(LOOK)
        for path in self.folder.glob("log-*.jsonl"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in map(json.loads, whole.splitlines()):
                self.lines.append(line)
                self._latest[line["pid"]] = {**self._latest.get(line["pid"], {}), **line}
                self._step = max(self._step, line.get("step", 0))
                self._moved = time.monotonic()
        self._progress(f"{self.label}: step {self._step:,} of {self.steps:,}", min(0.99, self.share))
        self._pause()

    def kill_one(self) -> str:
        """Kill one rank where it stands. Return the name of its host, as Horovod knows it."""
        pid = self.random.choice(self._members())
        self.note("kill", pid)
        _send(pid, signal.SIGKILL)
        return str(self._latest[pid]["host"])

    def note(self, kind: str, pid: int | None = None, seconds: float = 0.0) -> None:
        """Note a trouble."""
        self.troubles.append({"time": time.monotonic(), "step": self._step, "kind": kind, "pid": pid, "seconds": seconds})

    def _pause(self) -> None:
        now = time.monotonic()
        if now < self._next_pause:
            return
        if self._paused is not None:
            _send(self._paused, signal.SIGCONT)
            self._paused, self._next_pause = None, now + self.random.uniform(*BETWEEN_PAUSES)
        elif members := self._members():
            self._paused, seconds = self.random.choice(members), self.random.uniform(*PAUSE)
            _send(self._paused, signal.SIGSTOP)
            self.note("pause", self._paused, seconds)
            self._next_pause = now + seconds

    def _members(self) -> list[int]:
        """List the processes of the ranks that train now."""
        alive = set(self._alive())
        return [pid for pid in self._latest if pid in alive]

    def _alive(self) -> list[int]:
        """List the processes of this soak, by the mark in their environment."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if f"{MARK}={self._mark}".encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def _fail(self, what: str) -> None:
        sys.stderr.writelines(self._output.read_text(errors="replace").splitlines(keepends=True)[-ranks.TAIL :])
        raise RanksFailed(f"the ranks of {self.label} {what}; their last lines are above, all in {self._output}")


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def horovod(driver: Driver, count: int) -> None:
    """Run a soak under horovodrun, in its elastic mode: one is killed, one joins, one leaves, one joins."""
    hosts = HOSTS[:count]
    script = driver.folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat '{driver.folder}/hosts'\n")
    script.chmod(0o755)
    offer(driver, hosts, "start")
    options = ["--min-np", str(count - 1), "--max-np", str(count), "--host-discovery-script", str(script)]
    options += ["--network-interface", "lo", "--start-timeout", "120", "--elastic-timeout", "120"]
    job = [sys.executable, "-m", "laboratory.soak.job", "horovod", *driver.arguments]
    driver.start([sys.executable, "-m", "horovod.runner.launch", "-np", str(count), *options, *job], count)
    driver.train_until(0.2, count)
    hosts.remove(driver.kill_one())
    driver.train_until(0.35, count - 1)
    hosts.append(LATER_HOSTS[0])
    offer(driver, hosts, "join")
    driver.train_until(0.5, count)
    hosts.pop(driver.random.randrange(count))
    offer(driver, hosts, "leave")
    driver.train_until(0.65, count - 1)
    offer(driver, [*hosts, LATER_HOSTS[1]], "join")
    driver.train_until(1.0, count)
    driver.end_ranks()


def offer(driver: Driver, hosts: Sequence[str], kind: str) -> None:
    """Let Horovod find these hosts, each for one rank."""
    driver.note(kind)
    new = driver.folder / "hosts.new"
    new.write_text("".join(f"{host}:1\n" for host in hosts))
    new.replace(driver.folder / "hosts")


def ddp(driver: Driver, count: int) -> None:
    """Run a soak under torchrun: one is killed, and all start again; then one less; then all."""
    for ranks_now, end in ((count, 0.4), (count - 1, 0.6), (count, 1.0)):
        driver.note(f"launch of {ranks_now} ranks")
        options = [f"--nproc-per-node={ranks_now}", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        job = ["-m", "laboratory.soak.job", "ddp", *driver.arguments]
        # Otherwise torch's own store keeps the dead ranks' addresses, and gloo's restarted ranks call those.
        apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        driver.start([sys.executable, "-m", "torch.distributed.run", *options, *job], ranks_now, **apart)
        if end == 0.4:
            driver.train_until(0.2, count)
            driver.kill_one()
        driver.train_until(end, ranks_now)
        driver.end_ranks()


NETWORKS = {"horovod": horovod, "ddp": ddp}
