"""Train for long on real ranks in trouble, and judge whether everything stays flat and no gradient is lost.

The ranks are killed, joined and taken away; gradients spike and overflow; the loss scale moves; the spec changes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from laboratory import options, ranks, report
from laboratory.machine import ROOT
from laboratory.options import Refused
from laboratory.ranks import RanksFailed
from laboratory.report import Progress
from laboratory.soak.job import STOP
from laboratory.soak.judge import judge
from laboratory.soak.plan import ENTRIES, SPECS, Plan

EXAMPLES = """\
examples:
  scripts/lab soak --name amd-epyc                           # 20,000 steps over Horovod, then 20,000 over DDP
  scripts/lab soak --network horovod --steps 500 --seed 3    # a few minutes

The ranks' logs stay in --cache."""

# Seconds: between two looks, until ranks that make no progress have failed, and until an ended launcher must be gone.
LOOK, MOST_WITHOUT_PROGRESS, UNTIL_GONE = 0.1, 180.0, 10.0

# Names of this machine, each of which Horovod takes for a host. It never returns to one where a process died.
HOSTS = ["localhost", "127.0.0.1", "127.1", "127.0.1"]
LATER_HOSTS = ["0x7f.1", "0x7f.0.1"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--network", choices=(*NETWORKS, "both"), default="both", help="(default: both, one after the other)")
    parser.add_argument("--steps", type=options.positive, default=20_000, help="steps of each network (default: 20000)")
    parser.add_argument("--ranks", type=options.positive, default=4, help="ranks at the start and at the end (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of gradients, specs and trouble (default: 0)")
    options.add_places(parser, "none", ROOT / "build" / "soak")


def run(chosen: argparse.Namespace) -> int:
    """Soak each network, judge it, and write the result. Return 1 if a verdict fails."""
    if not 2 <= chosen.ranks <= len(HOSTS):
        raise Refused(f"--ranks {chosen.ranks} must be from 2 to {len(HOSTS)}: one of them leaves in mid-training")
    soaks = {network: soak(network, chosen) for network in ([*NETWORKS] if chosen.network == "both" else [chosen.network])}
    settings = {"steps": chosen.steps, "ranks": chosen.ranks, "seed": chosen.seed, "entries": ENTRIES, "specs": SPECS}
    report.save(chosen, None, {"settings": settings, "networks": soaks})
    return int(any(verdict["holds"] is False for found in soaks.values() for verdict in found["verdicts"]))


def soak(network: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Run one network's ranks to the end, judge them, and say how."""
    folder = Path(chosen.cache).resolve() / "-".join(filter(None, (chosen.name, network)))
    driver = Driver(folder, network, chosen)
    with ranks.termination_interrupts():
        try:
            NETWORKS[network](driver, chosen.ranks)
        finally:
            driver.kill_all()
    torch.set_num_threads(1)  # the sums are small, and threads that wait for each other take longer on a busy machine
    print(f"{network}: adding up the gradients of all steps", flush=True)
    plan = Plan(chosen.seed, chosen.steps)
    verdicts = judge(plan, chosen.ranks, driver.lines, driver.troubles, folder)
    words = {True: "holds", False: "FAILS", None: "not judged"}
    print(f"\n{network}", *(f"  {words[each.holds]:10}  {each.name}: {each.said}" for each in verdicts), sep="\n", flush=True)
    return {
        "verdicts": [verdict._asdict() for verdict in verdicts],
        "ranks": chosen.ranks,
        "steps": driver.lines[-1]["step"],
        "seconds": round(time.monotonic() - driver.began),
        "troubles": [{key: value for key, value in each.items() if key != "time"} for each in driver.troubles],
    }


class Driver:
    """The running ranks of one soak.

    folder: of logs and records. troubles: what was done to the ranks, and when. lines: of all logs.
    """

    def __init__(self, folder: Path, label: str, chosen: argparse.Namespace):
        self.folder, self.label, self.steps = folder, label, chosen.steps
        self.random, self._progress = random.Random(f"{chosen.seed} trouble"), Progress()
        self.arguments = [str(folder), str(chosen.seed), str(chosen.steps)]
        self.lines: list[dict[str, Any]] = []
        self.troubles: list[dict[str, Any]] = []
        self._step = 0
        self.began = self._moved = time.monotonic()
        self._read: dict[Path, int] = {}
        self._latest: dict[int, dict[str, Any]] = {}  # by process, over all its lines
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._output = folder / "output"
        self._process: subprocess.Popen[bytes]

    def kill_all(self) -> None:
        """End the launcher, and kill what it leaves."""
        self._progress.end()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(UNTIL_GONE)
        self._process.kill()
        for pid in self._members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start(self, words: Sequence[str], count: int, **variables: str) -> None:
        """Start a launcher with the job's ranks. All that they say goes to one file."""
        (self.folder / STOP).unlink(missing_ok=True)
        environment = ranks.environment(count, GLOO_SOCKET_IFNAME="lo", **variables)
        self._moved = time.monotonic()
        with self._output.open("ab") as file:
            self._process = subprocess.Popen(
                words, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def train_until(self, share: float, count: int) -> None:
        """Watch the ranks until this share is over and so many of them have begun together and logged steps."""
        first, what = len(self.lines), f"{count} ranks were {share:.0%} through"
        while not (self._step >= share * self.steps and self._have_trained(first, count)):
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

    def _watch(self, stuck: str) -> None:
        """Read what the ranks have logged. stuck: said where they stand still."""
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
        self._progress(f"{self.label}: step {self._step:,} of {self.steps:,}", min(0.99, self._step / self.steps))

    def kill_one(self) -> str:
        """Kill one rank where it stands. Return the name of its host, as Horovod knows it."""
        pid = self.random.choice(self._members())
        self.note("kill")
        os.kill(pid, signal.SIGKILL)
        return str(self._latest[pid]["host"])

    def note(self, kind: str) -> None:
        """Note a trouble."""
        self.troubles.append({"time": time.monotonic(), "step": self._step, "kind": kind})

    def _members(self) -> list[int]:
        """List the processes of the ranks that train now."""
        found = []
        for pid in self._latest:
            with contextlib.suppress(OSError):
                if str(self.folder) in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
        return found

    def _fail(self, what: str) -> None:
        sys.stderr.writelines(self._output.read_text(errors="replace").splitlines(keepends=True)[-ranks.TAIL :])
        raise RanksFailed(f"the ranks of {self.label} {what}; their last lines are above, all in {self._output}")


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
