"""Passes on what the ranks write: whole lines marked with the rank, or rank 0's bytes as they are."""

import os
import re
from collections import deque
from dataclasses import dataclass
from typing import IO

PORTION = 1 << 16  # bytes taken from a pipe at once; a longer line is passed on in pieces
PIPE_HOLDS = 1 << 20  # bytes, the most that Linux lets a user ask for
# A line ends in \n, \r\n or, as progress bars do it, \r; an \r that is the last byte so far may yet become \r\n.
LINE = re.compile(rb"([^\r\n]*)(\r?\n|\r(?!\Z))")


@dataclass
class Stream:
    """One pipe of a rank: passes on what arrives, whole lines at a time and marked, or as it is, or not at all."""

    rank: int
    last: deque[bytes]  # of both pipes of the rank
    source: IO[bytes]
    target: int
    marked: bool
    rest: bytes = b""

    def pump(self) -> bool:
        """Takes one portion of what is there; false at the pipe's end."""
        try:
            data = os.read(self.source.fileno(), PORTION)
        except BlockingIOError:
            return True
        if not self.marked and self.rank == 0:
            write_all(self.target, data)
        self._lines(data)
        return bool(data)

    def finish(self) -> None:
        """Takes what a full pipe may hold, no more: a grandchild may still be writing."""
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
            if match[1] or match[2] != b"\r":  # a bar's leading \r ends no line
                self._line(match[1])
        self.rest = self.rest[end:]
        if len(self.rest) > PORTION:
            self._flush()

    def _line(self, line: bytes) -> None:
        self.last.append(line)
        if self.marked:
            write_all(self.target, b"[%d] %s\n" % (self.rank, line))


def write_all(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]
