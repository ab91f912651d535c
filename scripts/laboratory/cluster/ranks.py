"""The ranks as processes: start them, pass on what they write, wait for them, and end them all when one fails."""

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from laboratory.cluster import kernel
from laboratory.cluster.guard import GRACE, say
from laboratory.cluster.launch import Place

# The number of a failed rank's lines that are repeated at the end.
LAST_LINES = 10

# The exit status of timeout(1).
TIMED_OUT = 124


# Bytes read from a pipe at once. A longer line is passed on in pieces.
PORTION = 1 << 16

# Bytes in a pipe, the most that Linux gives a user.
PIPE_HOLDS = 1 << 20


@dataclass
class Stream:
    """One pipe of a rank. Its bytes are passed on in marked lines, as they are, or not at all.

    Progress bars end their lines in \\r. Empty lines are left out. last: the last lines of both pipes of the rank.
    """

    rank: int
    last: deque[bytes]
    source: IO[bytes]
    target: int
    marked: bool
    rest: bytes = b""

    def pump(self) -> bool:
        """Read one portion. Return false at the pipe's end."""
        try:
            data = os.read(self.source.fileno(), PORTION)
        except BlockingIOError:
            return True
        if not self.marked and self.rank == 0:
            write_all(self.target, data)
        self._lines(data)
        return bool(data)

    def finish(self) -> None:
        """Read at most a full pipe: a grandchild may still be writing."""
        for _ in range(PIPE_HOLDS // PORTION):
            if not self.pump():
                break
        self._lines(b"\n")

    def _lines(self, data: bytes) -> None:
        *lines, self.rest = re.split(rb"[\r\n]+", self.rest + data)
        if len(self.rest) > PORTION:
            lines, self.rest = [*lines, self.rest], b""
        for line in filter(None, lines):
            self._line(line)

    def _line(self, line: bytes) -> None:
        self.last.append(line)
        if self.marked:
            write_all(self.target, b"[%d] %s\n" % (self.rank, line))


def write_all(target: int, data: bytes) -> None:
    """Write all bytes to a file descriptor."""
    while data:
        data = data[os.write(target, data) :]


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

    def streams(self, marked: bool) -> list[Stream]:
        """Return its two pipes."""
        assert self.process.stdout and self.process.stderr
        pipes = ((self.process.stdout, 1), (self.process.stderr, 2))
        return [Stream(self.place.rank, self.last, pipe, target, marked) for pipe, target in pipes]

    def signal_group(self, number: int) -> None:
        """Send a signal to the rank and its children."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, number)


def start(place: Place, command: list[str], variables: dict[str, str], directory: Path) -> Rank:
    """Start a rank on its host."""

    def enter() -> None:
        place.host.namespaces.enter()
        os.chdir(directory)

    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=enter,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise kernel.Refused(
            f"cannot start rank {place.rank}: {error}; check that {command[0]!r} can be run from {directory}"
        ) from error
    return Rank(place, process)


class Watch:
    """The wait for the ranks. A failure, a signal or the timeout ends the rest: TERM, and KILL after the grace.

    status: the exit status, once the cluster is ending.
    """

    def __init__(self, ranks: list[Rank], marked: bool, timeout: float | None) -> None:
        self.alive = {rank.process.pid: rank for rank in ranks}
        self.streams = [stream for rank in ranks for stream in rank.streams(marked)]
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout if timeout else None
        self.status: int | None = None
        self.failed: Rank | None = None
        self.asked = False

    def run(self) -> int:
        """Wait for all ranks. Return the exit status."""
        with selectors.DefaultSelector() as selector:
            bell = self._bell()
            selector.register(bell, selectors.EVENT_READ)
            for stream in self.streams:
                os.set_blocking(stream.source.fileno(), False)
                selector.register(stream.source, selectors.EVENT_READ, stream)
            while self.alive:
                wait = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
                for key, _ in selector.select(wait):
                    if key.data is None:
                        os.read(bell, 4096)
                    elif not key.data.pump():
                        selector.unregister(key.fileobj)
                self._reap()
                self._keep_time()
        for stream in self.streams:
            stream.finish()
        self._report()
        return self.status or 0

    def _bell(self) -> int:
        """Make a pipe that becomes readable on every signal, so that the loop need not poll."""
        heard, rung = os.pipe()
        os.set_blocking(heard, False)
        os.set_blocking(rung, False)
        signal.set_wakeup_fd(rung, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "asked", True))
        os.write(rung, b"\0")  # a rank may have ended before the handlers were set
        return heard

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

    def _keep_time(self) -> None:
        if self.asked and self.status is None:
            self._end(128 + signal.SIGTERM, "asked to end")
        elif self.deadline is not None and time.monotonic() >= self.deadline:
            if self.status is None:
                self._end(TIMED_OUT, f"not done after --timeout {self.timeout:g} seconds")
            else:
                for rank in self.alive.values():
                    say(f"{rank.name} did not end in {GRACE:g} seconds: killed")
                    rank.signal_group(signal.SIGKILL)
                self.deadline = None

    def _end(self, status: int, why: str) -> None:
        names = ", ".join(rank.name for rank in self.alive.values())
        say(f"{why}; ending {names}" if names else why)
        self.status = status
        self.deadline = time.monotonic() + GRACE
        for rank in self.alive.values():
            rank.signal_group(signal.SIGTERM)

    def _report(self) -> None:
        if self.failed and self.failed.last:
            say(f"the last lines of {self.failed.name}, the first to fail:")
            for line in self.failed.last:
                write_all(sys.stderr.fileno(), b"[%d] %s\n" % (self.failed.place.rank, line))
