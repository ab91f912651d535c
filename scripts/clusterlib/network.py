"""Builds the hosts: a network namespace each, joined by shaped veth links to a bridge in a namespace of its own."""

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from . import kernel
from .kernel import Namespaces

MOST_HOSTS = 250  # of a network with 254 addresses
INTERFACE = "eth0"
BUCKET = ("burst", "256kb", "latency", "50ms")  # one bucket holds four of TCP's largest (64 KB) segments


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    namespaces: Namespaces


def find(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def build(count: int, rate: str | None) -> list[Host]:
    """Leaves the calling process in the bridge's namespaces; all hosts are up, named and linked."""
    kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_NET)
    kernel.mount("none", "/", kernel.RECURSIVE | kernel.PRIVATE)  # no mount made from here on is seen outside
    kernel.mount("proc", "/proc")  # of the new process-id namespace
    middle = Namespaces.current()
    # The second form is how a socket for both IPv4 and IPv6 sees a peer: torch warns when it finds no name for it.
    table = "127.0.0.1 localhost\n::1 localhost\n" + "".join(
        f"{form}{_address(i)} {_name(i)}\n" for form in ("", "::ffff:") for i in range(count)
    )
    hosts = [_host(i, table) for i in range(count)]
    middle.enter()
    _run("ip", "link", "add", "bridge", "type", "bridge")
    _run("ip", "link", "set", "bridge", "up")
    for host in hosts:
        _link(host, rate)
    return hosts


def _name(i: int) -> str:
    return f"host{i}"


def _address(i: int) -> str:
    return f"10.77.0.{i + 1}"


def _host(i: int, table: str) -> Host:
    """Moves the calling process into a new host: its own network, host name, /etc/hosts, /sys and /dev/shm."""
    kernel.unshare(kernel.NEW_NET | kernel.NEW_NAMES | kernel.NEW_MOUNTS)
    socket.sethostname(_name(i))  # gloo listens where the host's own name leads: Horovod's process sets rely on it
    kernel.mount("tmpfs", "/sys")  # holds the hosts file, so that none is ever on disk; the bind keeps it alive below
    Path("/sys/hosts").write_text(table)
    kernel.mount("hosts", "/etc/hosts", kernel.BIND, "/sys/hosts")
    kernel.unmount("/sys")
    kernel.mount("sysfs", "/sys")  # shows this host's interfaces
    kernel.mount("tmpfs", "/dev/shm")  # hosts share no memory, and nothing stays in it after a kill
    return Host(_name(i), _address(i), Namespaces.current())


def _link(host: Host, rate: str | None) -> None:
    _run("ip", "link", "set", "lo", "up", inside=host.namespaces)
    peer = f"/proc/{os.getpid()}/fd/{host.namespaces.net}"
    _run("ip", "link", "add", host.name, "type", "veth", "peer", "name", INTERFACE, "netns", peer)
    _run("ip", "link", "set", host.name, "master", "bridge", "up")
    _run("ip", "link", "set", INTERFACE, "addrgenmode", "none", inside=host.namespaces)  # IPv4 only: one address a host
    _run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE, inside=host.namespaces)
    _run("ip", "link", "set", INTERFACE, "up", inside=host.namespaces)
    if rate:
        _run("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate, *BUCKET, inside=host.namespaces)
        _run("tc", "qdisc", "add", "dev", host.name, "root", "tbf", "rate", rate, *BUCKET)


def _run(tool: str, *arguments: str, inside: Namespaces | None = None) -> None:
    done = subprocess.run(
        [find(tool) or tool, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        preexec_fn=inside.enter if inside else None,
    )
    if done.returncode:
        what = " ".join([tool, *arguments])
        advice = (
            "check the rate and that the kernel has sch_tbf, or use --rate none"
            if tool == "tc"
            else "does the kernel have veth and bridge?"
        )
        raise kernel.Refused(f"`{what}` failed: {(done.stderr.strip() or 'no message').splitlines()[0]} ({advice})")
