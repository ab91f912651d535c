"""Requests as Horovod's operations. Horovod stays as it is published."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from gradcomp.messages import payload
from gradcomp.networks import Answer
from gradcomp.networks.mail import check_senders, mail, opened
from gradcomp.requests import Gather, Reduce, Reply, Request, Send, World

SHORTEST_PAUSE, LONGEST_PAUSE = 20e-6, 1e-3  # seconds


class HorovodNetwork:
    """Requests as Horovod's operations, each under a name that is the same on all ranks and in every step."""

    def __init__(self, process_set: hvd.ProcessSet):
        self.process_set = process_set
        self.prefix = ""
        self.hosts: tuple[int, ...] | None = None
        self.device = torch.device("cpu")
        self._numbered: object = None

    @property
    def world(self) -> World:
        return World(self.process_set.rank(), self.process_set.size(), self.hosts)

    @property
    def generation(self) -> object:
        """Horovod's map of handles, which every hvd.init() makes anew."""
        return getattr(mpi_ops, "_handle_map", mpi_ops)

    @property
    def host(self) -> str:
        own = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        if mpi_ops.is_homogeneous():  # then the launcher has numbered the hosts, and names may be as they like
            own += f" {hvd.cross_rank()}"
        return own

    def prepare(self) -> None:
        if self.generation is not self._numbered:
            self._numbered = self.generation
            self.prefix = f"gradcomp.{_next_number(self.generation, self.process_set.process_set_id)}"

    def start(self, request: Request, name: str) -> Answer:
        """Set an operation going; calling the result waits for its answer."""
        options = {"name": f"{self.prefix}.{name}", "process_set": self.process_set}
        match request:
            case Gather(own):
                handle = _try(hvd.allgather_async, own.bytes, **options)
                return lambda: [payload.read(own.form, part) for part in _result(handle).chunk(self.world.size)]
            case Reduce(tensor, scale):
                handle = _try(hvd.allreduce_async_, tensor, op=hvd.Sum, postscale_factor=scale, **options)
                return lambda: _result(handle)
            case Send():
                return self._send(request, name, options)

    def _send(self, request: Send, name: str, options: dict[str, Any]) -> Answer:
        outgoing, goes, comes = mail(request, self.world)
        handle = _try(hvd.alltoall_async, outgoing, splits=torch.tensor(goes, dtype=torch.int32), **options)

        def answer() -> Reply:
            incoming, counts = _result(handle)
            if counts.tolist() != comes:
                me = self.world.rank
                came = [i for i, n in enumerate(counts.tolist()) if n and (i != me or me in request.payloads)]
                check_senders(request, came, name)
            return opened(request, incoming, comes)

        return answer


def _result(handle: Any) -> Any:
    """An operation's result, waited for asleep: hvd.synchronize spins, on a core that a rank's backward may need."""
    pause = SHORTEST_PAUSE
    while not _try(hvd.poll, handle):
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    answer = _try(hvd.synchronize, handle)
    for tensor in answer if isinstance(answer, tuple) else (answer,):
        if tensor.is_cuda:
            _take_over(tensor)
    return answer


def _take_over(output: torch.Tensor) -> None:
    """Horovod's threads make outputs on the device's default stream, and see to it that this one waits. Another stream waits
    for that one, and memory that it still reads is given to nobody else."""
    stream, theirs = torch.cuda.current_stream(output.device), torch.cuda.default_stream(output.device)
    if stream != theirs:
        stream.wait_stream(theirs)
        output.record_stream(stream)


def _try(operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return operation(*args, **options)
    except (HorovodInternalError, ValueError) as error:
        raise broken(error) from error


def broken(error: Exception) -> HorovodInternalError:
    """The error that Horovod's own recovery knows, with what may have caused it."""
    return HorovodInternalError(
        f"gradcomp's exchange failed: {error} Possible causes: a rank called hvd.join(), in which gathers cannot take part "
        "(give every rank the same number of steps instead); a rank ended or raised, see its output; the network broke."
    )


_numbers: tuple[object, dict[int, int]] = (None, {})


def _next_number(generation: object, process_set: int) -> int:
    """Number the networks of a process set in the order in which they begin, for the names of their operations.

    Numbers begin at 0 again after every re-initialisation, so that an old process and a new one come to the same number.
    """
    global _numbers
    if _numbers[0] is not generation:
        _numbers = (generation, {})
    number = _numbers[1].get(process_set, 0)
    _numbers[1][process_set] = number + 1
    return number
