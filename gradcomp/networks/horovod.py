"""The network of Horovod: requests become its operations. Horovod itself is not changed."""

from __future__ import annotations

import functools
import math
import operator
import os
import socket
import time
from typing import Any

import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from gradcomp.core.requests import Gather, Payload, Purpose, Reduce, Reply, Request, Send, World
from gradcomp.messages import payload
from gradcomp.networks import Answer
from gradcomp.networks.alltoall import check_senders, pack, unpack
from gradcomp.networks.waits import MEETING, Wait, failure_sentence

# Seconds between two looks at an operation under way: of tensors in main memory, and of a GPU's, which idles in the meantime.
SHORTEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE_OF_GPU = 20e-6, 1e-3, 100e-6
# Seconds of an operation under way after which it is a wait for other ranks.
PATIENCE = 0.1
# Horovod's own limit of a wait, off by default. Version 0.28.1 over gloo did not keep to it in a trial.
_LIMIT = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_NO_ANSWER = f"no answer from the other ranks within the {{seconds:.0f}} s of {_LIMIT}, in {{place}}"
# The types of gradients that Horovod adds up.
SUMMED = {torch.float16, torch.float32, torch.float64}


def everyone() -> HorovodNetwork:
    """Return the network of all ranks."""
    return HorovodNetwork(hvd.global_process_set)


class HorovodNetwork:
    """Turns requests into Horovod's operations. An operation has the same name on all ranks and in every step."""

    _mpi_ops = mpi_ops

    def __init__(self, process_set: hvd.ProcessSet):
        self.process_set = process_set
        self.prefix = ""
        self.device = torch.device("cpu")
        self.meeting = ""
        self._prepared_for: object = None
        self._hosts: tuple[int, ...] | None = None
        self._world: tuple[object, World] | None = None  # with the generation in which it is the world

    # Horovod's map of handles, which every hvd.init() replaces. Each gradient asks for it: there is no call of Python's here.
    generation = property(operator.attrgetter("_mpi_ops._handle_map" if hasattr(mpi_ops, "_handle_map") else "_mpi_ops"))

    @property
    def world(self) -> World:
        here = self.generation
        if self._world is None or self._world[0] is not here:  # Horovod answers slowly
            self._world = here, World(self.process_set.rank(), self.process_set.size(), self._hosts)
        return self._world[1]

    @property
    def hosts(self) -> tuple[int, ...] | None:
        """Each rank's host as a number; None until the ranks have met."""
        return self._hosts

    @hosts.setter
    def hosts(self, hosts: tuple[int, ...] | None) -> None:
        self._hosts, self._world = hosts, None

    @property
    def ready(self) -> bool:
        return bool(hvd.is_initialized()) and bool(self.process_set.included())  # outside the set there is no world

    @property
    def host(self) -> str:
        name = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        if mpi_ops.is_homogeneous():
            # The launcher has numbered the hosts. The number tells hosts of the same name apart.
            name += f" {hvd.cross_rank()}"
        return name

    def prepare(self) -> None:
        if self.generation is not self._prepared_for:
            self._prepared_for = self.generation
            self.prefix = f"gradcomp.{_next_number(self.generation, self.process_set.process_set_id)}"

    def failure(self, text: str) -> Exception:
        """Make the error of an exchange that cannot go on, which Horovod's elastic recovery catches."""
        error: Exception = exchange_failure(RuntimeError(text))
        return error

    def start(self, request: Request, name: str) -> Answer:
        """Start an operation. The returned function waits for its reply."""
        # Requests between meetings have new names after each, so that one that a failure left behind meets no other.
        meets = request.purpose is Purpose.MEETING
        prefix, place = (self.prefix, MEETING) if meets else (f"{self.prefix}.{self.meeting}", name)
        options = {"name": f"{prefix}.{name}", "process_set": self.process_set}
        try:
            match request:
                case Gather(sent):
                    handle = hvd.allgather_async(sent.bytes, **options)
                    return functools.partial(self._gathered, sent, handle, place)
                case Reduce(tensor, scale):
                    handle = hvd.allreduce_async_(tensor, op=hvd.Sum, postscale_factor=scale, **options)
                    return functools.partial(self._result, handle, place, tensor.is_cuda)
                case Send():
                    outgoing, bytes_out, bytes_in = pack(request, self.world)
                    handle = hvd.alltoall_async(outgoing, splits=torch.tensor(bytes_out, dtype=torch.int32), **options)
                    return functools.partial(self._received, request, handle, place, bytes_in, outgoing.is_cuda)
        except (HorovodInternalError, ValueError) as error:
            raise exchange_failure(error) from error

    def _gathered(self, sent: Payload, handle: Any, place: str) -> Reply:
        received = self._result(handle, place, sent.bytes.is_cuda)
        size = sent.bytes.numel()
        return payload.read_all(sent.form, received, [size] * (received.numel() // size))

    def _received(self, request: Send, handle: Any, place: str, bytes_in: list[int], on_gpu: bool) -> Reply:
        incoming, counts = self._result(handle, place, on_gpu)
        if counts.tolist() != bytes_in:
            me = self.world.rank
            senders = [rank for rank, n in enumerate(counts.tolist()) if n and (rank != me or me in request.payloads)]
            check_senders(request, senders, place)
        return unpack(request, incoming, bytes_in)

    def _result(self, handle: Any, place: str, on_gpu: bool) -> Any:
        """Wait for an operation by polling and sleeping: hvd.synchronize spins on a core that a rank's backward may need."""
        pause, longest = SHORTEST_PAUSE, LONGEST_PAUSE_OF_GPU if on_gpu else LONGEST_PAUSE
        wait, limit, began = None, math.inf, time.monotonic()
        try:
            while not hvd.poll(handle):
                time.sleep(pause)
                pause = min(2 * pause, longest)
                if wait is not None:
                    wait.look()
                    if time.monotonic() > began + limit:
                        raise ValueError(_NO_ANSWER.format(seconds=limit, place=place))
                elif time.monotonic() > began + PATIENCE:
                    limit = float(os.environ.get(_LIMIT) or 0) or math.inf
                    wait = Wait(self.world.rank, place, limit)
            result = hvd.synchronize(handle)
        except (HorovodInternalError, ValueError) as error:
            raise exchange_failure(error) from error
        if on_gpu:
            for tensor in result if isinstance(result, tuple) else (result,):
                if tensor.is_cuda:
                    _wait_on_stream(tensor)
        return result


def version() -> str:
    """Return Horovod's version."""
    return str(horovod.__version__)


def built_with() -> tuple[list[str], list[str]]:
    """List the launchers that Horovod was built for, and the libraries that it reduces tensors with."""
    launchers = {"Gloo": hvd.gloo_built, "MPI": hvd.mpi_built}
    operations = {"NCCL": hvd.nccl_built, "oneCCL": hvd.ccl_built, "Gloo": hvd.gloo_built, "MPI": hvd.mpi_built}
    return ([name for name, built in launchers.items() if built()], [name for name, built in operations.items() if built()])


def _wait_on_stream(output: torch.Tensor) -> None:
    """Make the current stream wait for an output, and keep the output's memory until this stream has read it.

    Horovod's threads write outputs on the device's default stream. No other stream waits for these writes.
    """
    stream, default = torch.cuda.current_stream(output.device), torch.cuda.default_stream(output.device)
    if stream != default:
        stream.wait_stream(default)
        output.record_stream(stream)


def exchange_failure(error: Exception) -> HorovodInternalError:
    """Wrap an error in the type that Horovod's elastic recovery catches, with its possible causes."""
    joined = "a rank called hvd.join(), which gathers do not support (give every rank the same number of steps instead)"
    return HorovodInternalError(failure_sentence(error, cause=joined))


# The generation of the network, and for each process set in it the number of the next HorovodNetwork.
_numbers: tuple[object, dict[int, int]] = (None, {})


def _next_number(generation: object, process_set: int) -> int:
    """Number the networks of a process set in the order of their first meetings, for the names of their operations.

    Numbers restart at 0 after every re-initialisation, so that a process that stayed and a new one use the same numbers.
    """
    global _numbers
    if _numbers[0] is not generation:
        _numbers = (generation, {})
    number = _numbers[1].get(process_set, 0)
    _numbers[1][process_set] = number + 1
    return number
