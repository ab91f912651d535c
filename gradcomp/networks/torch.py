"""The network of torch.distributed: requests become collective operations of a process group."""

from __future__ import annotations

import math
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp.core.requests import Gather, Reduce, Reply, Request, Send, World
from gradcomp.messages import payload
from gradcomp.networks import Answer
from gradcomp.networks.mail import pack, unpack
from gradcomp.networks.waits import Wait, failure_note, failure_sentence, place_of

# One operation with two names: older versions of torch do not have the first, newer ones warn about the second.
all_gather: Callable[..., dist.Work] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# Seconds between two looks at the roll.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 0.2


class TorchNetwork:
    """Turns requests into collective operations of a process group. All ranks start them in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        self.hosts: tuple[int, ...] | None = None
        self._on_host = dist.get_backend(group) == "gloo"
        self.device = torch.device("cpu") if self._on_host else device  # NCCL takes only a GPU's tensors
        self.meeting = ""
        self._notes: StoreNotes | None = None
        self._meetings = 0
        self._started = 0  # operations
        self._told_failure = False

    @property
    def world(self) -> World:
        return World(dist.get_rank(self.group), dist.get_world_size(self.group), self.hosts)

    @property
    def generation(self) -> object:
        """The group, which lasts as long as the model's DistributedDataParallel."""
        return self.group

    @property
    def ready(self) -> bool:
        return True

    @property
    def host(self) -> str:
        return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"  # torchrun's number of the host

    def prepare(self) -> None:
        """Call the roll: wait until all ranks come to this meeting.

        A rank that met another operation than its own would end without a reason. The roll needs no operation.
        """
        if self._notes is None:
            self._notes = StoreNotes(self.group)
        self._meetings += 1
        self._notes.answer(self._meetings, self._started)
        end = time.monotonic() + _timeout_of(self.group)
        try:
            with Wait(self._notes, self.world, "meeting", self.meeting, leaves_note=not self._told_failure) as wait:
                pause = SHORTEST_PAUSE
                while absent := self._notes.absent(self._meetings):
                    if time.monotonic() > end:
                        raise RuntimeError(
                            f"ranks {', '.join(map(str, absent))} have not come to the meeting that all ranks call within the "
                            "group's timeout: they have ended, or they have not called gradcomp as this rank did"
                        )
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
                    wait.look(absent)
        except BaseException:
            self._notes.leave(self._meetings)
            self._meetings -= 1
            raise
        started = self._notes.answers(self._meetings)
        if len({*started}) > 1:
            raise RuntimeError(
                f"a step failed on some ranks only, and the group has exchanges that nobody will finish (the ranks have begun "
                f"{', '.join(map(str, started))}): start all ranks again from their last states"
            )

    def note_meeting(self, meeting: str) -> None:
        self.meeting = meeting
        self._take_failure_back()

    def _take_failure_back(self) -> None:
        if self._told_failure and self._notes is not None:
            self._notes.write("")
        self._told_failure = False

    def tell_failure(self, error: BaseException) -> None:
        self._told_failure = True
        with suppress(Exception):
            if self._notes is not None:
                self._notes.write(failure_note(error, self.meeting))

    def start(self, request: Request, name: str) -> Answer:
        """Start an operation. The returned function waits for its reply."""
        self._started += 1
        if "." in name:  # a bucket's request: this rank goes on after a load that was refused
            self._take_failure_back()
        match request:
            case Gather(sent):
                received = sent.bytes.new_empty(self.world.size * sent.bytes.numel())
                work = all_gather(received, sent.bytes, self.group, async_op=True)
                return self._after(
                    work, name, lambda: [payload.read(sent.form, part) for part in received.chunk(self.world.size)]
                )
            case Reduce(tensor, scale):
                work = dist.all_reduce(tensor, group=self.group, async_op=True)
                return self._after(work, name, lambda: tensor if scale == 1 else tensor.mul_(scale))
            case Send():
                outgoing, bytes_out, bytes_in = pack(request, self.world)
                incoming = outgoing.new_empty(sum(bytes_in))
                work = dist.all_to_all_single(incoming, outgoing, bytes_in, bytes_out, self.group, async_op=True)
                return self._after(work, name, lambda: unpack(request, incoming, bytes_in))

    def stock_mean(self, tensor: Tensor, form: torch.dtype, divides: bool) -> torch.futures.Future[Tensor]:
        """Start what DistributedDataParallel does: the mean over the ranks, added up in this type, in its place.

        divides: False multiplies by the rounded inverse of the number of ranks.
        """
        sent, size = tensor.to(form), self.world.size
        work = dist.all_reduce(sent.div_(size) if divides else sent.mul_(1 / size), group=self.group, async_op=True)
        assert work is not None
        found: torch.futures.Future[Tensor] = work.get_future().then(
            lambda done: tensor if sent is tensor else tensor.copy_(done.value()[0])
        )
        return found

    def _after(self, work: dist.Work | None, name: str, read: Answer) -> Answer:
        """Return a function that waits for the operation and then reads the reply. With NCCL only the stream waits."""
        assert work is not None

        def answer() -> Reply:
            if self._on_host and self._notes is not None:
                with Wait(self._notes, self.world, name, self.meeting) as wait:
                    wait_aloud(work, wait)
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(failure_sentence(error, place_of(name))) from error
            return read()

        return answer


def backends() -> list[str]:
    """List the backends that torch was built with."""
    built = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return [name for name, available in built.items() if available()]


def wait_aloud(work: dist.Work, wait: Wait) -> None:
    """Wait until an operation has ended or failed."""
    while not work.is_completed():
        with suppress(RuntimeError):  # the time is up, or the operation failed
            work.wait(timedelta(seconds=wait.next_look))
        wait.look()


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Return a group's timeout in seconds. Backends without a known one wait for ever."""
    for device in ("cpu", "cuda"):
        with suppress(Exception):
            timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
            return timeout.total_seconds()
    return math.inf


class StoreNotes:
    """The notes of the ranks of a group, and their roll, through the store that the group was made with."""

    def __init__(self, group: dist.ProcessGroup):
        get_store = getattr(dist.distributed_c10d, "_get_default_store", None)
        self._store: Any = get_store() if get_store is not None else None
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._scope = f"gradcomp/{group.group_name}/{_next_number(group)}"

    def write(self, text: str) -> None:
        """Leave this rank's note; an empty one takes it back."""
        if self._store is not None:
            with suppress(RuntimeError):  # the store may have ended with its rank, and the wait that failed says so better
                self._store.set(f"{self._scope}/note/{self._rank}", text)

    def read(self) -> Mapping[int, str] | None:
        """Read the notes of all ranks that left one."""
        if self._store is None:
            return None
        keys = {rank: f"{self._scope}/note/{rank}" for rank in range(self._size)}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def answer(self, meeting: int, started: int) -> None:
        """Say that this rank has come to a meeting, and how many operations it has started."""
        if self._store is not None:
            self._store.set(f"{self._scope}/{meeting}/{self._rank}", str(started))

    def answers(self, meeting: int) -> list[int]:
        """Return how many operations each rank has started. All have come."""
        if self._store is None:
            return []
        return [int(self._store.get(f"{self._scope}/{meeting}/{rank}")) for rank in range(self._size)]

    def leave(self, meeting: int) -> None:
        """Take this rank's answer to the roll back."""
        if self._store is not None:
            with suppress(Exception):  # the store may have ended with its rank
                self._store.delete_key(f"{self._scope}/{meeting}/{self._rank}")

    def absent(self, meeting: int) -> list[int]:
        """List the ranks that have not come yet. Nobody is, where there is no store."""
        if self._store is None or self._store.check([f"{self._scope}/{meeting}/{rank}" for rank in range(self._size)]):
            return []
        return [rank for rank in range(self._size) if not self._store.check([f"{self._scope}/{meeting}/{rank}"])]


# The number of networks made for each group. All ranks make them in the same order. A group that is made anew has the name of
# the old one, but not its number: another rank's process may be a new one.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _next_number(group: dist.ProcessGroup) -> int:
    _numbers[group] = _numbers.get(group, 0) + 1
    return _numbers[group]
