"""All that knows Horovod, which stays as it is published.

Two ways in. `Compression` goes into the stock `hvd.DistributedOptimizer(compression=...)`: Horovod hands it every gradient and
gets one number back for each, the carrier, which it then reduces in the gradient's stead. `DistributedOptimizer` makes the
stock optimizer and hands the gradients over itself, so that no carrier travels.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from torch import Tensor

import gradcomp
from gradcomp import agreement, carrier, checkpoint, kernels, wire
from gradcomp.compressors import make
from gradcomp.core import Compressor, Gather, Reduce, Reply, Request, Send, World
from gradcomp.reducer import Bucket, Reducer
from gradcomp.slot import SPARSE, Slot, check_momentum, named_of, rates_of, slots

Waiting = Callable[[], Reply]
SHORTEST_PAUSE, LONGEST_PAUSE = 20e-6, 1e-3  # seconds


class Network:
    """Requests as Horovod's operations, each under a name that is the same on all ranks and in every step."""

    def __init__(self, process_set: hvd.ProcessSet):
        self.process_set = process_set
        self.prefix = ""
        self._hosts: tuple[int, ...] | None = None

    @property
    def world(self) -> World:
        return World(self.process_set.rank(), self.process_set.size(), self._hosts)

    def find_hosts(self) -> None:
        """Asks all ranks on which host they are."""
        own = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        if mpi_ops.is_homogeneous():  # then the launcher has numbered the hosts, and names may be as they like
            own += f" {hvd.cross_rank()}"
        digest = hashlib.blake2b(own.encode(), digest_size=8).digest()
        record = torch.frombuffer(bytearray(digest), dtype=torch.int64)
        replies = self.start(Gather(wire.whole(record)), "hosts")()
        assert isinstance(replies, list)
        self._hosts = tuple(int(reply["bytes"]) for reply in replies)

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
                return self._send(request, options)

    def _send(self, request: Send, options: dict[str, Any]) -> Waiting:
        """A rank that has nothing for itself sends itself a word of zeros: no operation is of nothing, in or out."""
        parts, form, device = request
        me, size = self.world.rank, wire.size(form)
        word = torch.zeros(wire.ALIGNMENT, dtype=torch.uint8, device=device)
        outgoing = [parts[rank].bytes if rank in parts else word for rank in sorted({*parts, me})]
        sizes = [size if rank in parts else wire.ALIGNMENT * (rank == me) for rank in range(self.world.size)]
        handle = _try(hvd.alltoall_async, torch.cat(outgoing), splits=torch.tensor(sizes, dtype=torch.int32), **options)

        def answer() -> Reply:
            incoming, counts = _result(handle)
            came = dict(enumerate(incoming.split(counts.tolist())))
            if me not in parts:
                del came[me]
            return {rank: wire.read(form, part) for rank, part in came.items() if len(part) > 0}

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
        self.spec = str(spec)
        compressor = make(spec)
        if warning := check_momentum(compressor, optimizer):
            warnings.warn(warning, stacklevel=2)
        self._slots = slots(named_parameters)
        self._by_name = {slot.name: slot for slot in self._slots}
        self._by_id = {id(slot.parameter): slot for slot in self._slots}
        self._network = Network(process_set or hvd.global_process_set)
        layers = {slot.name: slot.layer for slot in self._slots}
        rates = None if optimizer is None else rates_of(optimizer, self._slots)
        self._options = layers, self._network, self._deliver, bucket_mb, seed, rates
        self._reducer = Reducer(compressor, *self._options)
        self._terms = {
            "gradcomp's version": gradcomp.__version__,
            "spec": self.spec,
            "seed": str(seed),
            "bucket_mb": str(bucket_mb),
            "parameter names": f"{len(self._slots)}: " + ", ".join(self._by_name),
            "parameter shapes": f"{sum(layer.size for layer in layers.values())} entries: "
            + ", ".join(slot.describe() for slot in self._slots),
        }
        self._session: object = None
        self._numbered: object = None
        self._next = 0
        self._held: dict[str, Slot] = {}
        self._optimizer = optimizer
        self._scale: float | None = None

    # The stock route. Horovod calls compress() in backward, and in step() decompress(), after the last gradient's compress().

    def compress(self, tensor: Tensor) -> tuple[Tensor, Slot]:
        """Takes a gradient over; Horovod gets a carrier in its stead."""
        slot = self._slot_of(tensor)
        self.put(slot)
        return carrier.carrier(self._network.world.rank), slot

    def decompress(self, tensor: Tensor, ctx: Slot | None) -> Tensor:
        """The gradient with the update in it; what became of the carrier tells how Horovod reduces."""
        if ctx is not None:
            try:
                scale = carrier.scale(tensor.item(), self._network.world.size)
            except ValueError as error:
                if self._reducer.steps_done == 0:
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
        """Notes that this parameter's gradient is complete; the last one of a bucket sets the bucket's exchange going.

        hold: not before the ranks have met; until then gradients are held back, and finish() makes up for it.
        """
        with self._guarded():
            self._scale = None
            if hold and _session() is not self._session:
                self._held[slot.name] = slot
                return
            self._meet()
            self._reducer.put(slot.name, slot.open())

    def finish(self, scale: float) -> None:
        """The first call of a step brings it to its end: all gradients are then scale times the mean update."""
        if self._scale is not None:
            return
        with self._guarded():
            for name in list(self._held):
                self.put(self._held.pop(name))
            self._scale = scale
            self._reducer.finish()

    def slot(self, parameter: Tensor) -> Slot:
        """The slot of a parameter."""
        if id(parameter) not in self._by_id:
            raise ValueError(_UNKNOWN)
        return self._by_id[id(parameter)]

    def stats(self) -> dict[str, Any]:
        """Figures of the last step on this rank."""
        return self._reducer.stats()

    def change(self, spec: str | Compressor) -> None:
        """Continues with another spec, between two steps and on all ranks; what has not been sent yet is carried over."""
        compressor = make(spec)
        if warning := check_momentum(compressor, self._optimizer):
            warnings.warn(warning, stacklevel=2)
        changed = Reducer(checkpoint.carrying(compressor, self._reducer), *self._options)
        checkpoint.carry(self._reducer, changed)
        self._reducer, self.spec, self._session = changed, str(spec), None
        self._terms["spec"] = self.spec

    def state_dict(self) -> dict[str, Any]:
        """What this rank's next step depends on. Every rank has its own: save one for each."""
        return {"spec": self.spec, "rank": checkpoint.save(self._reducer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what state_dict() gave on this rank."""
        checkpoint.same_spec(state["spec"], self.spec)
        checkpoint.load(self._reducer, state["rank"])

    def _meet(self) -> None:
        """Before the first exchange, and again after Horovod was initialised anew (an elastic reset): do all ranks agree?

        This waits for the other ranks. DistributedOptimizer comes here in step(), the order of which is the same on all ranks.
        The stock route must come before its first carrier, inside a backward hook: two optimizers in one backward then have to
        reach their first gradients in the same order on all ranks, in the first step.
        """
        session = _session()
        if session is self._session:
            return
        self._reducer.abort()
        if session is not self._numbered:
            self._network.prefix = f"gradcomp.{_next_number(session, self._network.process_set.process_set_id)}"
            self._numbered = session
        terms = {**self._terms, "compressor's state": self._reducer.alike()}
        records = self._network.start(Gather(wire.whole(agreement.record(terms))), "agreement")()
        assert isinstance(records, list)
        agreement.check(terms, [record.bytes for record in records])
        self._network.find_hosts()
        self._session = session

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """After any failure the step under way is forgotten, and the next one begins with a meeting."""
        try:
            yield
        except BaseException:
            self._session = None
            self._held.clear()
            raise

    def _deliver(self, bucket: Bucket, update: Tensor) -> None:
        assert self._scale is not None
        members = [self._by_name[name] for name in bucket.layout.names]
        kernels.spread(update, [bucket.grads[slot.name] for slot in members], self._scale)
        for slot in members:
            slot.close()

    def _slot_of(self, tensor: Tensor) -> Slot:
        """The parameter whose gradient this is; the search begins behind the one found last, where it nearly always is."""
        count = len(self._slots)
        for i in range(self._next, self._next + count):
            slot = self._slots[i % count]
            if slot.parameter.grad is tensor:
                self._next = i % count + 1
                return slot
        if id(tensor) in self._by_id:
            raise ValueError(
                "op=Adasum hands over parameters, not gradients, and cannot be compressed; use op=Average or op=Sum"
            )
        if any(slot.parameter.grad is not None and slot.parameter.grad.is_sparse for slot in self._slots):
            raise ValueError(SPARSE)
        raise ValueError(_UNKNOWN)


def _session() -> object:
    """What is another one after every hvd.init(), which makes a new map of handles."""
    return getattr(mpi_ops, "_handle_map", mpi_ops)


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


_UNKNOWN = (
    "a gradient came of a parameter that gradcomp does not know: it is not among the named_parameters that Compression was "
    "given, or was frozen when Compression was made"
)


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
