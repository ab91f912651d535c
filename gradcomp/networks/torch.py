"""The network of torch.distributed: requests become collective operations of a process group."""

from __future__ import annotations

import functools
import math
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp.core.requests import Gather, Purpose, Reduce, Reply, Request, Send, World
from gradcomp.messages import payload
from gradcomp.native import extension
from gradcomp.networks import Answer, waits
from gradcomp.networks.alltoall import pack, unpack

# Operations with two names: older versions of torch do not have the first, newer ones warn about the second.
reduce_scatter: Callable[..., dist.Work | None] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# Seconds between two looks at the roll.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 0.2


class TorchNetwork:
    """Turns requests into collective operations of a process group. All ranks start them in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        numbers = tuple(dist.get_process_group_ranks(group))
        self.world = World(dist.get_rank(group), len(numbers), None, numbers)
        # The group lasts as long as the model's DistributedDataParallel.
        self.generation: object = group
        self.ready = True
        self.host = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"  # torchrun's number of the host
        # Two names, as of reduce_scatter. A group's own methods save the checks of torch's functions, which cost microseconds.
        self._all_gather: Callable[..., dist.Work] = getattr(group, "all_gather_single", None) or group._allgather_base
        self._on_host = dist.get_backend(group) == "gloo"
        self.device = torch.device("cpu") if self._on_host else device  # NCCL takes only a GPU's tensors
        self.meeting = ""
        self._roll: Roll | None = None
        self._meetings = 0
        self._started = 0  # operations
        self._timeout = math.inf  # the group's, in seconds

    @property
    def hosts(self) -> tuple[int, ...] | None:
        """Each rank's host as a number; None until the ranks have met."""
        return self.world.hosts

    @hosts.setter
    def hosts(self, hosts: tuple[int, ...] | None) -> None:
        self.world = self.world._replace(hosts=hosts)  # made once: every request asks for it

    def prepare(self) -> None:
        """Call the roll: wait until all ranks come to this meeting.

        A rank that met another operation than its own would end without a reason. The roll needs no operation.
        """
        if self._roll is None:
            self._roll = Roll(self.group)
        self._meetings += 1
        meeting = f"meeting {self._meetings}"
        self._roll.arrive(meeting, str(self._started))
        self._timeout, pause = _timeout_of(self.group), SHORTEST_PAUSE
        end = time.monotonic() + self._timeout
        wait = waits.Wait(self.world.number(self.world.rank), waits.MEETING, self._timeout)
        try:
            while missing := self._roll.missing(meeting):
                if time.monotonic() > end:
                    raise RuntimeError(
                        f"ranks {', '.join(map(str, missing))} have not come to the meeting that all ranks call within the "
                        "group's timeout: they have ended, or they have not called gradcomp as this rank did"
                    )
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                wait.look(missing)
        except BaseException:
            self._roll.depart(meeting)
            self._meetings -= 1
            raise
        started = self._roll.texts(meeting)
        if len({*started}) > 1:
            raise RuntimeError(
                f"a step failed on some ranks only, and the group has exchanges that cannot finish (the ranks have begun "
                f"{', '.join(started)}): start all ranks again from their last states"
            )

    def failure(self, text: str) -> Exception:
        """Make the error of an exchange that cannot go on."""
        return RuntimeError(text)

    def start(self, request: Request, name: str) -> Answer:
        """Start an operation. The returned function waits for its reply."""
        self._started += 1
        place = waits.MEETING if request.purpose is Purpose.MEETING else name
        match request:
            case Gather(sent):
                sizes = [sent.bytes.numel()] * self.world.size
                received = sent.bytes.new_empty(sum(sizes))
                work = self._all_gather(received, sent.bytes)
                return self._after(work, place, received, functools.partial(payload.read_all, sent.form, received, sizes))
            case Reduce(tensor, scale):
                work = self.group.allreduce([tensor])
                return self._after(work, place, tensor, lambda: tensor if scale == 1 else tensor.mul_(scale))
            case Send():
                outgoing, bytes_out, bytes_in = pack(request, self.world)
                incoming = outgoing.new_empty(sum(bytes_in))
                work = dist.all_to_all_single(incoming, outgoing, bytes_in, bytes_out, self.group, async_op=True)
                return self._after(work, place, incoming, lambda: unpack(request, incoming, bytes_in))

    def _after(self, work: dist.Work | None, place: str, received: Tensor, read: Answer) -> Answer:
        """Return a function that waits for the operation and then reads what was received. With NCCL only the stream waits."""
        assert work is not None
        number, began_on = self._started, extension.stream(received) if received.is_cuda else 0

        def answer() -> Reply:
            if self._on_host and self._roll is not None and not work.is_completed():
                self._wait_for(work, self._roll, f"operation {number}", place)
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(waits.failure_sentence(error, place)) from error
            if received.is_cuda and extension.stream(received) != began_on:  # whose next allocation may take the memory
                received.record_stream(torch.cuda.current_stream(received.device))
            return read()

        return answer

    def _wait_for(self, work: dist.Work, roll: Roll, operation: str, place: str) -> None:
        """Wait until an operation has ended or failed. After some seconds, tell the other ranks that this one is there."""
        with suppress(RuntimeError):  # the time is up, or the operation failed
            work.wait(timedelta(seconds=waits.TELL_AFTER))
        if work.is_completed():
            return
        wait = waits.Wait(self.world.number(self.world.rank), place, self._timeout, waited=waits.TELL_AFTER)
        with suppress(RuntimeError):  # the store may have ended with its rank, and the operation that fails says so better
            roll.arrive(operation)
        while not work.is_completed():
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=wait.seconds_left))
            if not work.is_completed():
                with suppress(RuntimeError):
                    wait.look(roll.missing(operation))
        roll.depart(operation)


def backends() -> list[str]:
    """List the backends that torch was built with."""
    built = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return [name for name, available in built.items() if available()]


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Return a group's timeout in seconds. Backends without a known one wait for ever."""
    for device in ("cpu", "cuda"):
        with suppress(Exception):
            timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
            return timeout.total_seconds()
    return math.inf


class Roll:
    """The ranks of a group that have come to a meeting or an operation, by the store that the group was made with."""

    def __init__(self, group: dist.ProcessGroup):
        get_store = getattr(dist.distributed_c10d, "_get_default_store", None)
        self._store: Any = get_store() if get_store is not None else None
        self._rank, self._numbers = dist.get_rank(group), dist.get_process_group_ranks(group)
        self._scope = f"gradcomp/{group.group_name}"
        if self._store is not None:
            # Counted in the store, which may outlast the group, as that of torchrun does, or this rank's process.
            self._scope += f"/{self._store.add(self._key('networks', self._rank), 1)}"

    def arrive(self, to: str, text: str = "") -> None:
        """Say that this rank has come, with a text for the others."""
        if self._store is not None:
            self._store.set(self._key(to, self._rank), text)

    def depart(self, to: str) -> None:
        """Take this rank's coming back."""
        if self._store is not None:
            with suppress(Exception):  # the store may have ended with its rank
                self._store.delete_key(self._key(to, self._rank))

    def missing(self, to: str) -> list[int] | None:
        """List the ranks that have not come yet, by number in the whole job. None if they are unknown, without a store."""
        if self._store is None:
            return None
        if self._store.check([self._key(to, rank) for rank in range(len(self._numbers))]):
            return []
        return [number for rank, number in enumerate(self._numbers) if not self._store.check([self._key(to, rank)])]

    def texts(self, to: str) -> list[str]:
        """Return the texts of all ranks, which have come."""
        ranks = range(0 if self._store is None else len(self._numbers))
        return [self._store.get(self._key(to, rank)).decode() for rank in ranks]

    def _key(self, to: str, rank: int) -> str:
        return f"{self._scope}/{to}/{rank}"


@torch.no_grad()
def share_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the first one's tensors, in any type. Those without memory are left out."""
    first = dist.get_global_rank(group, 0)
    for each in tensors:
        if each.numel() and not each.is_meta:
            whole = each.contiguous()
            dist.broadcast(whole.view(-1).view(torch.uint8), first, group)  # gloo does not know all types
            if whole.data_ptr() != each.data_ptr():
                each.copy_(whole)
