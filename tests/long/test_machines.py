"""Bare machines: the commands of docs/start.md run from nothing, to the last test. Without rights, set-up names every package.

A machine is a folder, made by debootstrap. Its commands run in mount, process and host-name namespaces of their own: mounts and
processes end with the command, however it ends. A machine takes up to 9 GB of disk and an hour; `-k` chooses one. The record,
benchmarks/results/machines.json, has the last run of each.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from laboratory import machine as this_machine
from laboratory.gpu import stages
from laboratory.report import write

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "results" / "machines.json"
LOG = ROOT / "build" / "machine.log"  # of a command that failed
PROGRAMS = ("debootstrap", "unshare", "pivot_root", "setpriv", "git", "tar")
LACKING = [program for program in PROGRAMS if not shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")]
NVCC = shutil.which("nvcc")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="bare machines were NOT tested: they need root"),
    pytest.mark.skipif(bool(LACKING), reason=f"bare machines were NOT tested: {LACKING} missing, apt-get install debootstrap"),
]

UID = 1000
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INSTALL = "DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends"
# Settings of proxies, certificates and package indexes, and those of torch for scripts/setup. Machines get them.
SETTINGS = re.compile(r"(?i)(https?|ftp|all|no)_proxy|PIP_\w+|SSL_CERT_FILE|(REQUESTS|CURL)_CA_BUNDLE|GRADCOMP_TORCH\w*")

# $1 is the root; folders to bind read-only follow, then "--" and the command.
ENTER = """set -e
root=$1; shift
hostname fresh
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
while [ "$1" != -- ]; do
  mkdir -p "$root$1"
  mount --bind "$1" "$root$1"
  mount -o remount,bind,ro "$root$1"
  shift
done
shift
# Not chroot: a process that comes back to a mount namespace, as those of scripts/cluster do, would leave the folder.
cd "$root"
pivot_root . .
umount --lazy .
exec env -u PWD -u OLDPWD -u SHLVL "$@"
"""


class Cell(NamedTuple):
    """One machine: its release, packages that its user has already, CXX, the user, and whether nvcc is there.

    checks: whether scripts/check runs there, too. It needs g++. horovod: without it, the demo is that of DDP. torch: for pip.
    """

    suite: str
    packages: str
    cxx: str
    user: str
    nvcc: bool = False
    checks: bool = False
    horovod: bool = True
    torch: str = ""

    @property
    def installs(self) -> bool:
        """Whether set-up can install system packages by itself."""
        return self.user == "root" or "sudo" in self.packages


# Releases of Ubuntu: components, archive, and debootstrap's script, which older debootstraps do not find by the release's name.
ARCHIVE = ["main,universe", "http://archive.ubuntu.com/ubuntu", "/usr/share/debootstrap/scripts/gutsy"]
UBUNTU = {"jammy": ARCHIVE, "noble": ARCHIVE}

CELLS = {
    "debian12-gcc12-root": Cell("bookworm", "", "", "root", checks=True),
    "debian13-gcc14-user": Cell("trixie", "", "", "newcomer", checks=True),
    "ubuntu24-gcc13-user": Cell("noble", "", "", "newcomer", checks=True),
    "debian13-gcc14-ddp": Cell("trixie", "sudo", "", "newcomer", horovod=False),
    # The oldest Python and torch that pyproject.toml admits.
    "ubuntu22-gcc11-oldest": Cell("jammy", "", "", "root", horovod=False, torch="torch==2.3.0"),
    "debian13-clang19-user": Cell("trixie", "clang", "clang++", "newcomer"),
    "debian13-gcc14-nvcc-user": Cell("trixie", "", "", "newcomer", nvcc=True),
}


class Machine:
    """A bare machine with a checkout of the last commit in its user's home."""

    def __init__(self, root: Path, cell: Cell):
        self.root, self.cell = root, cell
        self.home = "/root" if cell.user == "root" else f"/home/{cell.user}"
        components, *archive = UBUNTU.get(cell.suite, ["main"])
        words = ["debootstrap", "--variant=minbase", f"--components={components}", cell.suite, root, *archive]
        subprocess.run(words, check=True, capture_output=True)
        (root / "etc/hosts").write_text("127.0.0.1\tlocalhost\n127.0.1.1\tfresh\n")  # as Debian's installer writes it
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        self.must(f"apt-get update && {INSTALL} util-linux {cell.packages}", "root")
        if cell.user != "root":
            self.must(f"useradd --create-home --uid {UID} --shell /bin/bash {cell.user}", "root")
        if "sudo" in cell.packages:
            (root / "etc/sudoers.d" / cell.user).write_text(f"{cell.user} ALL=(ALL) NOPASSWD: ALL\n")
        checkout = root / self.home.lstrip("/") / "gradcomp"
        checkout.mkdir()
        with subprocess.Popen(["git", "-C", ROOT, "archive", "HEAD"], stdout=subprocess.PIPE) as archive:
            subprocess.run(["tar", "-x", "-C", checkout], stdin=archive.stdout, check=True)
        if cell.user != "root":
            subprocess.run(["chown", "-R", f"{UID}:{UID}", checkout], check=True)

    def run(self, command: str, user: str) -> tuple[int, str]:
        """Run a command of bash. Return its status and its output."""
        settings = {name: value for name, value in os.environ.items() if SETTINGS.fullmatch(name)}
        folders = []
        for name, word in [(name, word) for name, value in settings.items() for word in value.split()]:
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.is_dir():
                folders.append(path)
            elif path.is_absolute() and path.is_file():
                # Apart from the machine's own files, which packages write: set-up installs some that bring certificates.
                copy = self.root / "settings" / path.name
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(path, copy)
                settings[name] = settings[name].replace(str(path), f"/settings/{path.name}")
        programs = PATH
        if self.cell.nvcc:
            home = stages.toolkit()
            assert home is not None
            folders.append(home)
            programs = f"{home}/bin:{programs}"
        # Values may hold tokens, and every user reads command lines: they travel in the environment.
        environment = {"PATH": programs, "HOME": self.home, "USER": user, "LANG": "C.UTF-8", **settings}
        if self.cell.cxx:
            environment["CXX"] = self.cell.cxx
        if self.cell.torch:
            environment["GRADCOMP_TORCH"] = self.cell.torch
        as_user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"] if user != "root" else []
        apart = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--propagation", "private"]
        words = [*apart, "bash", "-c", ENTER, "enter", self.root, *folders, "--", *as_user, "bash", "-c", command]
        done = subprocess.run(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.returncode, done.stdout

    def must(self, command: str, user: str) -> str:
        """Run a command that may not fail. Return its output."""
        status, said = self.run(command, user)
        if status:
            LOG.parent.mkdir(exist_ok=True)
            LOG.write_text(said)
        assert status == 0, f"{command} ended with status {status}, {LOG} has it all:\n{said[-5000:]}"
        return said


@pytest.fixture(params=CELLS)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    cell = CELLS[request.param]
    if cell.nvcc and NVCC is None:
        pytest.skip(f"{request.param} was NOT tested: nvcc is not on this machine")
    try:
        yield Machine(tmp_path / "root", cell)
    finally:
        shutil.rmtree(tmp_path / "root", ignore_errors=True)


def record(cell: Cell, ready: str, minutes: dict[str, float]) -> None:
    """Write what a machine did, in place of its last run."""
    (name,) = (name for name, each in CELLS.items() if each == cell)
    own = {"cell": name, **this_machine.origin("scripts/check --long"), "ready": ready, "minutes": minutes}
    del own["versions"]  # this machine's: those of the cell stand in its last line
    with RECORD.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        others = [each for each in json.loads(RECORD.read_text())["cells"] if each["cell"] != name and each["cell"] in CELLS]
        write(RECORD, {"what": "machines", "cells": [*others, own]})


def test_the_commands_of_start_run_on_a_bare_machine(machine: Machine) -> None:
    page = (ROOT / "docs" / "start.md").read_text()
    (block,) = re.findall(r"## Install everything\n.*?^```sh\n(.+?)^```", page, re.MULTILINE | re.DOTALL)
    demo, check = [line.partition("#")[0].strip() for line in block.splitlines()]
    if not machine.cell.horovod:
        demo += " --ddp"
    user, there = machine.cell.user, f"cd {machine.home}/gradcomp"

    if not machine.cell.installs:
        status, said = machine.run(f"{there} && {demo}", user)
        asked = re.search(r"as root, run: (apt-get install [a-z0-9+. -]+)$", said, re.MULTILINE)
        assert status != 0 and asked and not (machine.root / machine.home.lstrip("/") / "gradcomp" / ".venv").exists(), said
        machine.must(asked[1].replace("apt-get install", INSTALL), "root")

    minutes, ready = {}, ""
    doctor = ". .venv/bin/activate && gradcomp doctor"
    for name, command in (
        ("set-up and demo", demo),
        ("demo", demo),
        ("doctor", doctor),
        *[("check", check)] * machine.cell.checks,
    ):
        began = time.monotonic()
        said = machine.must(f"{there} && {command}", user)
        minutes[name] = round((time.monotonic() - began) / 60, 1)
        if command == demo:
            *_, found = re.finditer(r"^ready: torch \S+, .*CUDA kernels (yes|no)", said, re.MULTILINE)
            assert (found[1] == "yes") == machine.cell.nvcc, found[0]
            assert ("horovod" in found[0]) == machine.cell.horovod
            assert name != "demo" or said.startswith(found[0]), f"the demo set up again what is there:\n{said}"
            # Only root makes hosts; it needs the package that set-up added.
            assert ("two emulated hosts with links of" in said) == (user == "root"), said
            shown = re.findall(r"^(\w+), dense .*\n.*\n.*\ntopk .* x .* %", said, re.MULTILINE)
            assert shown == ["DDP", "Horovod"][name == "demo" and machine.cell.horovod :][: 1 + machine.cell.horovod], said
            ready = found[0]
    again = "scripts/setup" if machine.cell.horovod else "scripts/setup --ddp"
    assert machine.must(f"{there} && {again}", user).count("\n") == 1, "a set-up that is done says one line"
    record(machine.cell, ready, minutes)
