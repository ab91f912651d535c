"""The hosts: a network namespace each, joined by shaped veth links to a bridge in a namespace of its own."""

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from laboratory.cluster import kernel
from laboratory.cluster.kernel import Namespaces

# The network interface of every host.
INTERFACE = "eth0"

# The options of the token bucket filter: it holds four of TCP's largest segments (64 KB).
TOKENS = ("burst", "256kb", "latency", "50ms")


@dataclass(frozen=True)
class Host:
    """One emulated host."""

    name: str
    address: str
    namespaces: Namespaces


def find(tool: str) -> str | None:
    """Find a program, also where only root's PATH leads."""
    return shutil.which(tool, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def named(rate: str) -> str:
    """Say the rate of links."""
    return "unshaped" if rate == "none" else rate


def build(count: int, rate: str) -> list[Host]:
    """Build the hosts and their links; `none` leaves these unshaped. This process stays in the bridge's namespaces."""
    kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_NET)
    kernel.mount("none", "/", kernel.RECURSIVE | kernel.PRIVATE)  # mounts from here on are invisible outside
    kernel.mount("proc", "/proc")  # of the new process-id namespace
    middle = Namespaces.current()
    # A socket for both IPv4 and IPv6 sees a peer in the second form. Torch warns where that has no name.
    table = "127.0.0.1 localhost\n::1 localhost\n" + "".join(
        f"{form}10.77.0.{i + 1} host{i}\n" for form in ("", "::ffff:") for i in range(count)
    )
    hosts = [_host(i, table) for i in range(count)]
    middle.enter()
    _run("ip", "link", "add", "bridge", "type", "bridge")
    _run("ip", "link", "set", "bridge", "up")
    for host in hosts:
        _link(host, rate)
    return hosts


def leave() -> None:
    """Move this process to a network that has the loopback alone. To be called in the guard's namespace."""
    kernel.unshare(kernel.NEW_NET | kernel.NEW_MOUNTS)
    kernel.mount("none", "/", kernel.RECURSIVE | kernel.PRIVATE)
    kernel.mount("proc", "/proc")  # of the new process-id namespace
    _run("ip", "link", "set", "lo", "up")


def _host(i: int, table: str) -> Host:
    """Move this process into a new host with its own network, host name, /etc/hosts, /sys and /dev/shm."""
    kernel.unshare(kernel.NEW_NET | kernel.NEW_NAMES | kernel.NEW_MOUNTS)
    # Gloo listens at the address of the host's own name, and Horovod's process sets rely on that.
    socket.sethostname(f"host{i}")
    kernel.mount("tmpfs", "/sys")  # for the hosts file, so that none is on disk; the bind below keeps it alive
    Path("/sys/hosts").write_text(table)
    kernel.mount("hosts", "/etc/hosts", kernel.BIND, "/sys/hosts")
    kernel.unmount("/sys")
    kernel.mount("sysfs", "/sys")  # shows this host's interfaces
    kernel.mount("tmpfs", "/dev/shm")  # hosts share no memory, and a kill leaves nothing in it
    return Host(f"host{i}", f"10.77.0.{i + 1}", Namespaces.current())


def _link(host: Host, rate: str) -> None:
    _run("ip", "link", "set", "lo", "up", inside=host.namespaces)
    peer = f"/proc/{os.getpid()}/fd/{host.namespaces.net}"
    _run("ip", "link", "add", host.name, "type", "veth", "peer", "name", INTERFACE, "netns", peer)
    _run("ip", "link", "set", host.name, "master", "bridge", "up")
    _run("ip", "link", "set", INTERFACE, "addrgenmode", "none", inside=host.namespaces)  # IPv4 only: one address a host
    _run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE, inside=host.namespaces)
    _run("ip", "link", "set", INTERFACE, "up", inside=host.namespaces)
    change([host], "none", rate)


def change(hosts: list[Host], before: str, rate: str) -> None:
    """Give all links another rate, at both ends. To be called in the bridge's namespaces."""
    for host in hosts if {before, rate} != {"none"} else ():
        shape(INTERFACE, rate, host.namespaces)
        shape(host.name, rate)


def shape(interface: str, rate: str, inside: Namespaces | None = None) -> None:
    """Give what an interface sends a rate; `none` ends the one that it has."""
    how, filtered = ("delete", []) if rate == "none" else ("replace", ["tbf", "rate", rate, *TOKENS])
    _run("tc", "qdisc", how, "dev", interface, "root", *filtered, inside=inside)


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
        words = " ".join([tool, *arguments])
        advice = (
            "check the rate and that the kernel has sch_tbf, or use --rate none"
            if tool == "tc"
            else "check that the kernel has veth and bridge"
        )
        raise kernel.Refused(f"`{words}` failed: {(done.stderr.strip() or 'no message').splitlines()[0]} ({advice})")
