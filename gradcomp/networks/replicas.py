"""The backend "gradcomp" of torch.distributed: FSDP2's all-reduce over replicas is gradcomp's exchange, and all else is native.

torch.distributed calls a process group's methods. A group of this backend has native ones for each device, and an all-reduce of
its own: a tensor that a door has announced is exchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "gradcomp"

_prefixed: Any = getattr(dist, "PrefixStore")  # noqa: B009 - torch does not export its type

# Exchanges a tensor in place, for a reduction.
Exchange = Callable[[Tensor, Any], None]


def _native(name: str) -> Any:
    """Return a method that calls the native backend's. Its first argument is a tensor, a list of them, or a list of lists."""

    def call(group: dist.ProcessGroup, first: Any, *arguments: Any, **options: Any) -> Any:
        tensor = first
        while not isinstance(tensor, Tensor):
            tensor = tensor[0]
        return getattr(group._get_backend(tensor.device), name)(first, *arguments, **options)

    return call


def _name(options: Any, given: Any) -> None:
    """Tell a native backend its group's name and ranks, as torch does: its flight recorder shows them."""
    options.group_name, options.global_ranks_in_group = given.group_id, given.global_ranks_in_group


def _timeout(given: Any) -> Any:
    """Return the time-out of the whole job's group, if it is shorter: a mesh has torch's default, which is half an hour."""
    found = [given.timeout]
    for device in ("cpu", "cuda") if dist.is_initialized() else ():
        with suppress(RuntimeError, AttributeError):
            whole: Any = dist.group.WORLD
            found.append(whole._get_backend(torch.device(device)).options._timeout)
    return min(found)


class ReplicaGroup(dist.ProcessGroup):
    """The process group of ranks with equal shards: a group of native backends, with an all-reduce of its own."""

    def __init__(self, given: Any, options: Any = None):
        """given, options: torch's, of a backend with its extended interface."""
        rank, size, timeout = given.group_rank, given.group_size, _timeout(given)
        super().__init__(rank, size)  # type: ignore[call-arg]
        kinds = dist.ProcessGroup.BackendType
        gloo: Any = dist.ProcessGroupGloo(_prefixed("cpu", given.store), rank, size, timeout)
        _name(gloo.options, given)
        self._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        if torch.cuda.is_available() and dist.is_nccl_available():
            if options is None:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
            _name(options, given)
            nccl = dist.ProcessGroupNCCL(_prefixed("cuda", given.store), rank, size, options)
            self._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        self._announced: tuple[weakref.ref[Tensor], Exchange] | None = None

    def announce(self, tensor: Tensor, exchange: Exchange) -> None:
        """Announce a tensor of gradients: its next all-reduce is this exchange. Only the last one that is announced counts."""
        self._announced = weakref.ref(tensor, self._forget), exchange

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        """Let the exchange of a tensor go that was never reduced."""
        if self._announced is not None and self._announced[0] is gone:
            self._announced = None

    def allreduce(self, tensors: Any, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        """Exchange a tensor that was announced; all-reduce others."""
        tensor: Tensor = tensors if isinstance(tensors, Tensor) else tensors[0]
        if self._announced is None or self._announced[0]() is not tensor:
            return self.allreduce_natively(tensors, *arguments, **options)
        (_, exchange), self._announced = self._announced, None
        exchange(tensor, *arguments, **options)
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
        done.set_result([tensor])
        c10d: Any = torch._C._distributed_c10d
        return c10d._create_work_from_future(done)

    allreduce_natively: Any = _native("allreduce")

    # In a class that Python derives, torch's own versions of these methods hold Python's lock while they wait for gloo's queue.
    # A thread of gloo's that lets a tensor go holds the queue, and waits for Python's lock. The coalesced all-gather and
    # reduce-scatter have no method of a backend to call.
    allgather: Any = _native("allgather")
    allreduce_coalesced: Any = _native("allreduce_coalesced")
    alltoall_base: Any = _native("alltoall_base")
    all_to_all_single: Any = _native("alltoall_base")  # its name from torch 2.13 on
    broadcast: Any = _native("broadcast")
    reduce_scatter: Any = _native("reduce_scatter")
    send: Any = _native("send")
    recv: Any = _native("recv")

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        options = opts or dist.BarrierOptions()
        native: Any = self._get_backend(options.device or torch.device("cpu"))
        return native.barrier(options)


def register() -> None:
    """Register the backend with torch.distributed, unless it is."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, ReplicaGroup, extended_api=True, devices=["cpu", "cuda"])


def native_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name the native backend that moves a group's tensors on a device."""
    if isinstance(group, ReplicaGroup):
        return "nccl" if device.type == "cuda" else "gloo"
    return dist.get_backend(group)
