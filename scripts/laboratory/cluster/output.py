"""The ranks' output: whole lines marked with the rank, or rank 0's bytes as they are."""

import os
import re
from collections import deque
from dataclasses import dataclass
from typing import IO

# Bytes read from a pipe at once. A longer line is passed on in pieces.
PORTION = 1 << 16

# Bytes in a pipe, the most that Linux gives a user.
PIPE_HOLDS = 1 << 20

# A line ends in \n, \r\n or, in progress bars, \r. An \r at the end of the bytes so far may become \r\n.
LINE = re.compile(rb"([^\r\n]*)(\r?\n|\r(?!\Z))")


@dataclass
class Stream:
    """One pipe of a rank. Its bytes are passed on in marked lines, as they are, or not at all.

    last: the last lines of both pipes of the rank.
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
        self._flush()

    def _flush(self) -> None:
        if self.rest.strip(b"\r"):
            self._line(self.rest.strip(b"\r"))
        self.rest = b""

    def _lines(self, data: bytes) -> None:
        self.rest += data
        end = 0
        for match in LINE.finditer(self.rest):
            end = match.end()
            if match[1] or match[2] != b"\r":  # the \r that begins a bar ends no line
                self._line(match[1])
        self.rest = self.rest[end:]
        if len(self.rest) > PORTION:
            self._flush()

    def _line(self, line: bytes) -> None:
        self.last.append(line)
        if self.marked:
            write_all(self.target, b"[%d] %s\n" % (self.rank, line))


def write_all(target: int, data: bytes) -> None:
    """Write all bytes to a file descriptor."""
    while data:
        data = data[os.write(target, data) :]
