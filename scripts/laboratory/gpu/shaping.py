"""Links of a set rate between ranks of one machine: a ladder of ways to make them, of which the first that holds is taken."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from laboratory import ranks
from laboratory.cluster import network
from laboratory.cluster.kernel import Namespaces

# From the most faithful one. Each host has a link of its own; ranks share a loopback interface that has the rates of all of
# them together; the kernel paces each connection, which needs no right; nothing is shaped.
LADDER = ("cluster", "loopback", "pacing", "none")

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
# Linux's option of a socket, in bytes a second, and its value for no limit.
SO_MAX_PACING_RATE, UNPACED = 47, 2**64 - 1


def bits(rate: str) -> float:
    """Return the bits a second of 1gbit."""
    found = re.fullmatch(r"([\d.]+)([kmg]?)bit", rate)
    assert found, rate
    return float(found[1]) * UNITS[found[2]]


def missing(how: str) -> str:
    """Return a sentence about what this machine lacks for a rung of the ladder; empty if it has all."""
    if how in ("pacing", "none"):
        return ""
    for tool in ("ip", "tc", "unshare"):
        if not network.find(tool):
            remedy = "util-linux" if tool == "unshare" else "iproute2, or let gpu_check --prepare pack it where it is"
            return f"the program {tool} is missing; install the Debian package {remedy}"
    if subprocess.run([*_as_root("--net"), "true"], capture_output=True).returncode:
        return "this user may not make network namespaces; run it as root (in a container: docker run --privileged)"
    return ""


def _as_root(*new: str) -> list[str]:
    """Write the beginning of a command that runs as root, in these new namespaces, whoever the user is."""
    return ["unshare", *new] if os.geteuid() == 0 else ["unshare", "--map-root-user", *new]


def command(how: str, count: int, job: Sequence[str]) -> list[str]:
    """Write the command of a job's ranks on a rung, whose links have no rate yet."""
    if how == "cluster":
        return [*_as_root(), *ranks.command("cluster", count, job, "none", "ddp")]
    launched = ["env", "GLOO_SOCKET_IFNAME=lo", *ranks.command("torchrun", count, job)]
    if how != "loopback":
        return launched
    return [*_as_root("--net"), "sh", "-c", f'{network.find("ip")} link set lo up && exec "$@"', "sh", *launched]


def change(how: str, before: str, rate: str, rank: int, size: int) -> None:
    """Give all links another rate; `none` is none. To be called by every rank, again where it has new connections."""
    if how == "pacing":
        limit = ctypes.c_ulong(UNPACED if rate == "none" else int(bits(rate) / 8))
        for file in Path("/proc/self/fd").iterdir():  # what is no connection refuses it
            ctypes.CDLL(None).setsockopt(int(file.name), socket.SOL_SOCKET, SO_MAX_PACING_RATE, ctypes.byref(limit), 8)
    elif how == "loopback" and rank == 0 and before != rate:
        network.shape("lo", rate if rate == "none" else f"{size * bits(rate):.0f}bit")
    elif how == "cluster" and before != rate:
        network.shape(network.INTERFACE, rate)
        network.shape(socket.gethostname(), rate, _first_process())


@functools.cache
def _first_process() -> Namespaces:
    """Open the namespaces of the cluster's first process, in which the bridge is."""
    return Namespaces.current("1")
