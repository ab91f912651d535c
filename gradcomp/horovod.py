"""All that knows Horovod, which stays as it is published.

Two ways in. `Compression` goes into the stock `hvd.DistributedOptimizer(compression=...)`: Horovod hands it every gradient and
gets one number back for each, the carrier, which it then reduces in the gradient's stead. `DistributedOptimizer` makes the
stock optimizer and hands the gradients over itself, so that no carrier travels.
"""

from __future__ import annotations

import inspect
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from torch import Tensor

from gradcomp import carrier, wire
from gradcomp.core import Compressor, Gather, Reduce, Reply, Request, Send, World
from gradcomp.front import UNKNOWN, Front
from gradcomp.slot import SPARSE, Slot, named_of

Waiting = Callable[[], Reply]
SHORTEST_PAUSE, LONGEST_PAUSE = 20e-6, 1e-3  # seconds


class Network:
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
    def session(self) -> object:
        """After every hvd.init() there is a new map of handles."""
        return getattr(mpi_ops, "_handle_map", mpi_ops)

    @property
    def host(self) -> str:
        own = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        if mpi_ops.is_homogeneous():  # then the launcher has numbered the hosts, and names may be as they like
            own += f" {hvd.cross_rank()}"
        return own

    def enter(self) -> None:
        if self.session is not self._numbered:
            self._numbered = self.session
            self.prefix = f"gradcomp.{_next_number(self.session, self.process_set.process_set_id)}"

    def start(self, request: Request, name: str) -> Waiting:
        """Sets an operation going; calling the result waits for its answer."""
        options = {"name": f"{self.prefix}.{name}", "process_set": self.process_set}
        match request:
            case Gather(payload):
                handle = _try(hvd.allgather_async, payload.bytes, **options)
                return lambda: [wire.read(payload.form, part) for part in _result(handle).chunk(self.world.size)]
            case Reduce(tensor, scale):
                handle = _try(hvd.allreduce_async_, tensor, op=hvd.Sum, postscale_factor=scale, **options)
                return lambda: _result(handle)
            case Send():
                return self._send(request, name, options)

    def _send(self, request: Send, name: str, options: dict[str, Any]) -> Waiting:
        outgoing, goes, comes = wire.mail(request, self.world)
        handle = _try(hvd.alltoall_async, outgoing, splits=torch.tensor(goes, dtype=torch.int32), **options)

        def answer() -> Reply:
            incoming, counts = _result(handle)
            if counts.tolist() != comes:
                me = self.world.rank
                request.check([i for i, n in enumerate(counts.tolist()) if n and (i != me or me in request.parts)], name)
            return wire.opened(request, incoming, comes)

        return answer

    def finish(self, handle: Waiting) -> Reply:
        return handle()


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
        raise _broken(error) from error


def _broken(error: Exception) -> HorovodInternalError:
    return HorovodInternalError(
        f"gradcomp's exchange failed: {error} Possible causes: a rank called hvd.join(), in which gathers cannot take part "
        "(give every rank the same number of steps instead); a rank ended or raised, see its output; the network broke."
    )


class Compression:
    """What the stock optimizer takes as compression=: one for each optimizer.

    named_parameters: as for Horovod, usually model.named_parameters(). process_set: the one the optimizer gets, if it gets one.
    optimizer: lets a momentum in the spec be checked against the optimizer's own, and tells learning rates to what needs them.
    """

    def __init__(
        self,
        spec: str | Compressor,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        process_set: hvd.ProcessSet | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        bucket_mb: float = 25,
        seed: int = 0,
    ):
        network = Network(process_set or hvd.global_process_set)
        self._front = Front(spec, named_parameters, network, optimizer, bucket_mb, seed)
        self._next = 0
        self._held: dict[str, Slot] = {}
        self._finished = False

    # The stock route. Horovod calls compress() in backward, and in step() decompress(), after the last gradient's compress().

    def compress(self, tensor: Tensor) -> tuple[Tensor, Slot]:
        """Takes a gradient over; Horovod gets a carrier in its stead."""
        slot = self._slot_of(tensor)
        self.put(slot)
        return carrier.carrier(self._front.network.world.rank), slot

    def decompress(self, tensor: Tensor, ctx: Slot | None) -> Tensor:
        """The gradient with the update in it; what became of the carrier tells how Horovod reduces."""
        if ctx is not None:
            try:
                scale = carrier.scale(tensor.item(), self._front.network.world.size)
            except ValueError as error:
                if self._front.steps_done == 0:
                    raise
                raise _broken(error) from error  # it was right before: a rank that called hvd.join() adds a carrier of 0
            self.finish(scale)
            assert ctx.parameter.grad is not None
            return ctx.parameter.grad
        if tensor.is_sparse:
            raise ValueError(SPARSE)
        return tensor

    # Both routes.

    def put(self, slot: Slot, hold: bool = False) -> None:
        """Notes that this parameter's gradient is complete.

        hold: not before the ranks have met, for which they wait for one another: until then gradients are held back, and
        finish() makes up for it. DistributedOptimizer calls that in step(), the order of which is the same on all ranks. The
        stock route cannot hold anything back, since the ranks must meet before the first carrier, inside a backward hook: two
        optimizers in one backward then have to reach their first gradients in the same order on all ranks, in the first step.
        """
        self._finished = False
        if hold and not self._front.has_met:
            self._held[slot.name] = slot
        else:
            self._front.put(slot)

    def finish(self, scale: float) -> None:
        """The first call of a step brings it to its end: all gradients are then scale times the mean update."""
        if self._finished:
            return
        held, self._held = self._held, {}
        for slot in held.values():
            self._front.put(slot)
        self._finished = True
        self._front.finish(scale)

    def slot(self, parameter: Tensor) -> Slot:
        """The slot of a parameter."""
        return self._front.slot(parameter)

    @property
    def spec(self) -> str:
        """What is in use."""
        return self._front.spec

    def stats(self) -> dict[str, Any]:
        """Figures of the last step on this rank."""
        return self._front.stats()

    def change(self, spec: str | Compressor) -> None:
        """Continues with another spec, between two steps and on all ranks; what has not been sent yet is carried over."""
        self._front.change(spec)

    def state_dict(self) -> dict[str, Any]:
        """What this rank's next step depends on. Every rank has its own: save one for each."""
        return self._front.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what state_dict() gave on this rank."""
        self._front.load_state_dict(state)

    def _slot_of(self, tensor: Tensor) -> Slot:
        """The parameter whose gradient this is; the search begins behind the one found last, where it nearly always is."""
        found = self._front.slots
        for i in range(self._next, self._next + len(found)):
            slot = found[i % len(found)]
            if slot.parameter.grad is tensor:
                self._next = i % len(found) + 1
                return slot
        if self._front.knows(tensor):
            raise ValueError(
                "op=Adasum hands over parameters, not gradients, and cannot be compressed; use op=Average or op=Sum"
            )
        if any(slot.parameter.grad is not None and slot.parameter.grad.is_sparse for slot in found):
            raise ValueError(SPARSE)
        raise ValueError(UNKNOWN)


_numbers: tuple[object, dict[int, int]] = (None, {})


def _next_number(session: object, process_set: int) -> int:
    """The how-manieth Compression this is to meet in this session and process set: its operations' names begin with it.

    Counted from 0 again after an elastic reset, so that an old process and a new one come to the same number.
    """
    global _numbers
    if _numbers[0] is not session:
        _numbers = (session, {})
    number = _numbers[1].get(process_set, 0)
    _numbers[1][process_set] = number + 1
    return number


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: str | Compressor = "topk",
    *,
    bucket_mb: float = 25,
    seed: int = 0,
    **stock_options: Any,
) -> Any:
    """hvd.DistributedOptimizer with a spec for compression=, without carriers; .compression and .stats() are added to it.

    All of Horovod's options are taken. groups and num_groups have nothing left to group: gradcomp's buckets stand in for them.
    """
    op = stock_options.get("op", hvd.Average)
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError("only op=hvd.Average and op=hvd.Sum can be compressed, not Adasum, Min, Max or Product")
    if stock_options.get("sparse_as_dense"):
        raise ValueError(SPARSE)
    stock_options.pop("groups", None)
    stock_options.pop("num_groups", None)
    named = named_of(optimizer, named_parameters)
    process_set = stock_options.get("process_set", hvd.global_process_set)
    own = Compression(compression, named, process_set=process_set, optimizer=optimizer, bucket_mb=bucket_mb, seed=seed)
    stock = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=own, **stock_options)
    if list(inspect.signature(stock._allreduce_grad_async).parameters) == ["p"]:
        stock._allreduce_grad_async = _handing_over(own, process_set, op)
    else:
        warnings.warn("this Horovod has another inside than 0.22 to 0.28; carriers are used", stacklevel=2)
    stock.compression = own
    stock.stats = own.stats
    return stock


def _handing_over(
    own: Compression, process_set: hvd.ProcessSet, op: Any
) -> Callable[[Tensor], tuple[Callable[[], Tensor], None]]:
    """What stands in for the stock optimizer's allreduce of one gradient: Horovod calls what it returns for the result."""

    def start(p: Tensor) -> tuple[Callable[[], Tensor], None]:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if p.grad.is_sparse:
            raise ValueError(SPARSE)
        own.put(own.slot(p), hold=True)

        def result() -> Tensor:
            own.finish(1.0 if op == hvd.Average else float(process_set.size()))
            assert p.grad is not None
            return p.grad

        return result, None

    return start
