"""Horovod's elastic mode: ranks die and join, and the updates and what waits still add up to the gradients of all commits."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import pytest
import ranks
import torch
from elastic_worker import CASES, EVERY, MOMENTUM, OWN_MOMENTUM, SPECS
from torch import Tensor

pytestmark = pytest.mark.long

# Names of this machine, each of which Horovod takes for a host: it leaves a host for good once a process died there.
HOSTS = ["localhost", "127.0.0.1", "127.1", "127.0.1"]
DIES, JOINS = "127.1", "0x7f.1"
SECONDS = 900


class Job:
    """An elastic training by horovodrun, which a test watches and disturbs."""

    def __init__(self, folder: Path, hosts: list[str]):
        self.folder, self.output = folder, folder / "out"
        self.end = time.monotonic() + SECONDS
        self.offer(hosts)
        script = folder / "hosts.sh"
        script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
        script.chmod(0o755)
        horovodrun = str(Path(sys.executable).parent / "horovodrun")
        options = ["--min-np", "2", "--max-np", "4", "--host-discovery-script", str(script), "--network-interface", "lo"]
        program = [sys.executable, "-m", "elastic_worker", str(folder)]
        command = [horovodrun, "-np", str(len(hosts)), *options, "--start-timeout", "300", "--elastic-timeout", "300", *program]
        with self.output.open("wb") as file:
            environment = ranks._environment(str(folder)) | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def offer(self, hosts: list[str]) -> None:
        """Let Horovod find these hosts, each for one rank."""
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{host}:1\n" for host in hosts))
        new.replace(self.folder / "hosts")

    def found(self) -> list[dict[str, Any]]:
        """Return what every worker wrote at its last commit."""
        return [pickle.loads(file.read_bytes()) for file in self.folder.glob("*.pickle")]

    def wait(self, what: str, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        while not condition(self.found()):
            assert self.process.poll() is None, f"horovodrun ended before {what}\n{self.said()}"
            assert time.monotonic() < self.end, f"no {what}\n{self.said()}"
            time.sleep(0.5)

    def grow(self, size: int, commits: int = 3) -> int:
        """Wait until this many ranks have committed a few times. Return the step."""
        first: list[int] = []

        def condition(found: list[dict[str, Any]]) -> bool:
            latest = max((own["step"] for own in found), default=0)
            members = [own for own in found if own["size"] == size and own["step"] == latest]
            first.extend([latest] if len(members) == size and not first else [])
            return bool(first) and latest >= first[0] + commits * EVERY

        self.wait(f"{commits} commits of {size} ranks", condition)
        return max(own["step"] for own in self.found())

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@functools.cache
def trained() -> tuple[list[dict[str, Any]], str]:
    """Train with four ranks, with three after one died, and with four again. Return the workers' findings, and the output."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(folder, HOSTS)
        try:
            job.grow(4)
            (folder / f"die {DIES}").touch()
            job.grow(3)
            job.offer([*HOSTS, JOINS])
            job.grow(4)
            (folder / "stop").touch()
            job.wait("end", lambda found: len(list(folder.glob("*.done"))) == 4)
            return job.found(), job.said()
        finally:
            job.stop()


def members() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the findings of the ranks at the end, and of the one that died."""
    found, _ = trained()
    (dead,) = [own for own in found if own["host"] == DIES]
    return sorted((own for own in found if own is not dead), key=lambda own: own["rank"]), dead


def waiting(own: dict[str, Any], case: int) -> Tensor:
    """Return a rank's part of what the mean update of all later steps will be, if all later gradients are zero.

    A velocity u goes on to add m u + m^2 u + ... to the residual.
    """
    tail = own["velocity"][case] * MOMENTUM / (1 - MOMENTUM)
    return (own["waits"][case] + tail) / own["size"]


every_case = pytest.mark.parametrize("case", range(len(CASES)), ids=[" ".join(each) for each in CASES])


@every_case
def test_updates_and_what_waits_are_the_gradients_of_committed_steps(case: int) -> None:
    """Up to what waited on the rank that died, at its last commit. Rounding: sums of some hundred float32 gradients."""
    last, dead = members()
    assert {own["size"] for own in last} == {4} and dead["size"] == 4 and dead["step"] < last[0]["step"]
    weight = 1 / (1 - MOMENTUM) if "momentum" in CASES[case][1] or CASES[case][1] == OWN_MOMENTUM else 1.0
    gradients = weight * sum(own["given"][case] for own in [*last, dead])
    wanted = gradients - waiting(dead, case)
    came = -last[0]["weights"][case] + sum(waiting(own, case) for own in last)
    torch.testing.assert_close(came, wanted, rtol=1e-3, atol=2e-3)
    lost = waiting(dead, case).norm()
    assert lost > 0 and (came - wanted).norm() < 1e-2 * lost, "what is lost stands out"


@every_case
def test_all_ranks_end_alike(case: int) -> None:
    last, _ = members()
    for own in last:
        assert torch.equal(own["weights"][case], last[0]["weights"][case])
        assert own["steps"][case] == own["step"] == last[0]["step"]


def test_the_rank_that_died_is_named() -> None:
    _, said = trained()
    _, dead = members()
    sentence = f"rank {dead['rank']} of 4 left; the gradients that waited in the residual there are lost. The other ranks go on"
    assert said.count(sentence) >= len(CASES)


def test_other_optimizers_keep_horovods_own_handler() -> None:
    last, _ = members()
    handlers = last[0]["handlers"]
    assert handlers.pop("plain") == "OptimizerStateHandler" and handlers.pop("model") == "ModelStateHandler"
    assert len(handlers) == len(SPECS) * len(doors.DOORS) and {*handlers.values()} == {"_Handler"}
