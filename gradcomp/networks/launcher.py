"""Notes between ranks through the key-value server of Horovod's launcher (horovodrun with Gloo)."""

from __future__ import annotations

import http.client
import os
from collections.abc import Mapping

# Seconds that the launcher may take to answer.
PATIENCE = 2.0


class LauncherNotes:
    """The notes of the ranks of a process set. There are none where another launcher started the ranks.

    scope: a name for the process set. rank, size: this rank's number in it, and the number of its ranks.
    """

    def __init__(self, scope: str, rank: int, size: int):
        self._scope, self._rank, self._size = scope, rank, size

    def write(self, text: str) -> None:
        """Leave this rank's note; an empty one takes it back."""
        self._ask("PUT", self._rank, text.encode())

    def read(self) -> Mapping[int, str] | None:
        """Read the notes of all ranks that left one."""
        notes = {}
        for rank in range(self._size):
            answer = self._ask("GET", rank)
            if answer is None:
                return None
            if answer:
                notes[rank] = answer.decode()
        return notes

    def _ask(self, method: str, rank: int, body: bytes | None = None) -> bytes | None:
        """Ask the launcher. Return None where it does not answer, and nothing where there is no note."""
        host, port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
        if not host or not port:
            return None
        connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
        try:
            connection.request(method, f"/{self._scope}/{rank}", body)
            response = connection.getresponse()
            text = response.read()
            return text if response.status == http.client.OK else b""
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
