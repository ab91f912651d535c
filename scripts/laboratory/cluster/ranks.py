"""The ranks as processes: their variables, what they write, the wait for them, and their end when one fails."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any

from laboratory.cluster import kernel
from laboratory.cluster.guard import GRACE, say
from laboratory.cluster.network import INTERFACE, Host

# The number of a failed rank's lines that are repeated at the end.
LAST_LINES = 10

# Bytes read from a pipe at once. A longer line is passed on in pieces.
PORTION = 1 << 16

# Seconds of a wait that nothing limits.
LONG = 3600.0

# A line is written whole.
_writing = Lock()

# Always free: the first host has ports of its own.
TORCH_PORT = 29500

# Horovod's rendezvous server, for hosts given as host0:1,host1:1. It prints its port, and runs until it is killed.
RENDEZVOUS = """
import signal, sys
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

hosts, server = parse_hosts(sys.argv[1]), RendezvousServer()
port = server.start()
server.init(get_host_assignments(hosts, sum(host.slots for host in hosts)))
print(port, flush=True)
signal.pause()
"""


@dataclass(frozen=True)
class Place:
    """A rank's place in the world: its host's index (cross), and its index among that host's ranks (local)."""

    host: Host
    rank: int
    cross: int
    local: int


def places(hosts: list[Host], each: int) -> list[Place]:
    """List the places of so many ranks on each host."""
    return [Place(host, cross * each + local, cross, local) for cross, host in enumerate(hosts) for local in range(each)]


def rendezvous(launcher: str, hosts: list[Host], each: int) -> dict[str, str]:
    """Return the variables that all ranks share. For Horovod, start the server that they name."""
    common = {"NCCL_SOCKET_IFNAME": INTERFACE}
    if launcher == "torch":
        return common | {"MASTER_ADDR": hosts[0].name, "MASTER_PORT": str(TORCH_PORT), "GLOO_SOCKET_IFNAME": INTERFACE}
    return common | {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": hosts[0].address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(_serve(hosts, each)),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": INTERFACE,
    }


def variables(launcher: str, hosts: int, each: int, place: Place) -> dict[str, str]:
    """Return one rank's variables, as horovodrun or torchrun sets them."""
    own = {"RANK": place.rank, "LOCAL_RANK": place.local}
    if launcher == "torch":
        own |= {"WORLD_SIZE": hosts * each, "LOCAL_WORLD_SIZE": each}
        return {name: str(value) for name, value in own.items()}
    own |= {"SIZE": hosts * each, "LOCAL_SIZE": each, "CROSS_RANK": place.cross, "CROSS_SIZE": hosts}
    return {f"HOROVOD_{name}": str(value) for name, value in own.items()} | {"HOROVOD_HOSTNAME": place.host.name}


def _serve(hosts: list[Host], each: int) -> int:
    """Start Horovod's rendezvous server on the first host. Return its port."""
    plan = ",".join(f"{host.name}:{each}" for host in hosts)
    server = subprocess.Popen(
        [sys.executable, "-c", RENDEZVOUS, plan],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=hosts[0].namespaces.enter,
    )
    assert server.stdout
    port = server.stdout.readline().strip()
    if not port.isdigit():
        raise kernel.Refused(
            "Horovod's rendezvous server did not start (its message is above); run scripts/setup, or use --launcher torch"
        )
    return int(port)


def write(target: int, data: bytes) -> None:
    """Write all bytes to a file descriptor. End the cluster if nobody reads them any more."""
    try:
        with _writing:
            while data:
                data = data[os.write(target, data) :]
    except BrokenPipeError:
        os._exit(1)


@dataclass
class Rank:
    """A running rank, and the last lines of its output."""

    place: Place
    process: subprocess.Popen[bytes]
    last: deque[bytes] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    @property
    def name(self) -> str:
        """Name the rank and its host."""
        return f"rank {self.place.rank} on {self.place.host.name}"

    def pass_on(self, pipe: IO[bytes], target: int, marked: bool) -> None:
        """Pass on what a pipe brings, until its end: in marked lines; or rank 0's as it is, and no other's.

        Progress bars end their lines in \\r. Empty lines are left out.
        """
        rest = b""
        while data := os.read(pipe.fileno(), PORTION):
            if not marked and self.place.rank == 0:
                write(target, data)
            *lines, rest = re.split(rb"[\r\n]+", rest + data)
            if len(rest) > PORTION:
                lines, rest = [*lines, rest], b""
            self._keep(lines, target, marked)
        self._keep([rest], target, marked)

    def _keep(self, lines: list[bytes], target: int, marked: bool) -> None:
        for line in filter(None, lines):
            self.last.append(line)
            if marked:
                write(target, b"[%d] %s\n" % (self.place.rank, line))

    def signal_group(self, number: int) -> None:
        """Send a signal to the rank and its children."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, number)


def start(place: Place, command: list[str], variables: dict[str, str], directory: Path) -> Rank:
    """Start a rank on its host."""

    def enter() -> None:
        place.host.namespaces.enter()
        os.chdir(directory)

    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True, preexec_fn=enter, **pipes)
    except (OSError, subprocess.SubprocessError) as error:
        raise kernel.Refused(
            f"cannot start rank {place.rank}: {error}; check that {command[0]!r} can be run from {directory}"
        ) from error
    return Rank(place, process)


class Watch:
    """The wait for the ranks. A failure or a signal ends the rest: TERM, and KILL after the grace.

    status: the exit status, once the cluster is ending.
    """

    def __init__(self, ranks: list[Rank], marked: bool) -> None:
        self.alive = {rank.process.pid: rank for rank in ranks}
        self.threads = []
        for rank in ranks:
            assert rank.process.stdout and rank.process.stderr
            for pipe, target in ((rank.process.stdout, 1), (rank.process.stderr, 2)):
                self.threads.append(Thread(target=rank.pass_on, args=(pipe, target, marked)))
        self.deadline: float | None = None
        self.status: int | None = None
        self.failed: Rank | None = None

    def run(self) -> int:
        """Wait for all ranks. Return the exit status."""
        heard = {signal.SIGCHLD, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, heard)  # taken one by one below; a rank may have ended before
        for thread in self.threads:
            thread.start()
        self._reap()
        while self.alive:
            left = LONG if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            found = signal.sigtimedwait(heard, left)
            self._reap()
            if found and found.si_signo == signal.SIGTERM and self.status is None:
                self._end(128 + signal.SIGTERM, "asked to end")
            elif self.deadline is not None and time.monotonic() >= self.deadline:
                for rank in self.alive.values():
                    say(f"{rank.name} did not end in {GRACE:g} seconds: killed")
                    rank.signal_group(signal.SIGKILL)
                self.deadline = None
        if os.getpid() == 1:  # of the cluster's processes: those that ranks left behind hold the pipes open
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        for thread in self.threads:
            thread.join()
        if self.failed and self.failed.last:
            say(f"the last lines of {self.failed.name}, the first to fail:")
            for line in self.failed.last:
                write(sys.stderr.fileno(), b"[%d] %s\n" % (self.failed.place.rank, line))
        return self.status or 0

    def _reap(self) -> None:
        """Collect ended ranks, and orphans, which become children of a first process."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            rank = self.alive.pop(ended.si_pid, None)
            if rank is None:
                os.waitpid(ended.si_pid, 0)
            elif (code := rank.process.wait()) and self.status is None:
                self.failed = rank
                how = f"failed with status {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
                self._end(code if code > 0 else 128 - code, f"{rank.name} {how}")

    def _end(self, status: int, why: str) -> None:
        names = ", ".join(rank.name for rank in self.alive.values())
        say(f"{why}; ending {names}" if names else why)
        self.status = status
        self.deadline = time.monotonic() + GRACE
        for rank in self.alive.values():
            rank.signal_group(signal.SIGTERM)
