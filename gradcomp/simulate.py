"""The simulator: runs the sessions of all ranks in one process, in lock-step, and counts the bytes that each would send."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradcomp.aliases import either
from gradcomp.core.compressor import Compressor
from gradcomp.engine import state
from gradcomp.engine.bucket import GRADIENT_TYPES, Bucket, check_type
from gradcomp.engine.context import layer_rates
from gradcomp.engine.meeting import Flow
from gradcomp.engine.phases import Door
from gradcomp.engine.plan import checked_shapes
from gradcomp.engine.reducer import Options, Reducer, Stats
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Slot, Slots, checked
from gradcomp.native.memory import Memory, Update
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make
from gradcomp.telemetry.observer import Intervals, Observer, Writer


class Simulation:
    """The exchanges of simulated ranks, for one model.

    step() exchanges what it is given, with error feedback: gradients; or the updates that each rank's optimizer has made, as
    topk does on a cluster.

    Args:
        spec: "name:knob=value", or a compressor.
        shapes: The shapes of the model's parameters, by name.
        world: The number of ranks; or world_size.
        seed: The seed of random draws.
        bucket_mb: The largest size of a bucket of several layers, in 10^6 bytes; or bucket_cap_mb. 25 by default.
        device: The device of the gradients.
        ranks_per_host: The number of ranks on each simulated host.
        optimizer: The source of learning rates, for specs that need them.
        named_parameters: The optimizer's parameters, with the names of shapes.

    Attributes:
        bytes_sent: The bytes that each rank handed to the network in the last step.

    Raises:
        ValueError: A spec, a shape or a number does not fit.

    Example:
        >>> simulation = gradcomp.Simulation("topk:ratio=0.5", {"w": (4,)}, world_size=2)
        >>> update = simulation.step([{"w": torch.randn(4)}, {"w": torch.randn(4)}])["w"]
    """

    def __init__(
        self,
        spec: str | Compressor,
        shapes: Mapping[str, Sequence[int]],
        world: int | None = None,
        seed: int = 0,
        *,
        world_size: int | None = None,
        bucket_mb: float | None = None,
        bucket_cap_mb: float | None = None,
        device: str | torch.device = "cpu",
        ranks_per_host: int = 1,
        optimizer: torch.optim.Optimizer | None = None,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    ):
        world = either(0, world=world, world_size=world_size)
        if world < 1:
            raise ValueError(f"world={world} must be at least 1: a simulation needs at least one rank")
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host={ranks_per_host} must be at least 1")
        shapes = checked_shapes(shapes, "shapes=")
        named = {} if named_parameters is None else dict(checked(named_parameters))
        if optimizer is not None and named.keys() != shapes.keys():
            raise ValueError("optimizer= needs named_parameters= with the same names as shapes")
        self._device = torch.device(device)
        self._slots = {name: Slot(name, shape, self._device, named.get(name)) for name, shape in shapes.items()}
        self._renew_updates()
        slots, self._board = Slots([*self._slots.values()]), Board(world)
        networks = [MemoryNetwork(self._board, rank, ranks_per_host) for rank in range(world)]
        self._optimizer, self._layer_of = optimizer, {id(each): name for name, each in named.items()}
        bucket_mb = either(None, bucket_mb=bucket_mb, bucket_cap_mb=bucket_cap_mb)
        options, door = Options(bucket_mb, seed, memory=Memory()), Door(has_rates=optimizer is not None)
        first = Session(make(spec), slots, networks[0], options, door)
        self._sessions = [first]
        for rank, network in enumerate(networks[1:], 1):
            checks = replace(options, deliver=functools.partial(_compare, rank))
            self._sessions.append(Session(first.compressor, slots, network, checks, door))
        self.bytes_sent = [0] * world

    def change(self, spec: str | Compressor) -> None:
        """Continue with another spec. Residuals are carried over.

        Args:
            spec: "name:knob=value", or a compressor.
        """
        compressor = make(spec)
        self._together([session.resume.changing(compressor) for session in self._sessions])

    set_spec = change

    def step(self, grads: Sequence[Mapping[str, Tensor | None]]) -> dict[str, Tensor]:
        """Run one step, and return the mean update by name.

        All ranks compute the update, as on a cluster.

        Args:
            grads: For each rank, the gradients by name. A gradient that is missing or None counts as zero.

        Raises:
            RuntimeError: The ranks' updates differ in some bit.
        """
        if len(grads) != len(self._sessions):
            raise ValueError(
                f"step() got gradients of {len(grads)} ranks, but the simulation has {len(self._sessions)}; pass one dict "
                "for each rank"
            )
        for rank, of_rank in enumerate(grads):
            self._check(rank, of_rank)
        if not 0 < _users_of(self._storage) <= self._users:
            self._renew_updates()
        try:
            if not self._sessions[0].has_met:
                self._together([session.meeting() for session in self._sessions])
            self._exchange(grads)
        except BaseException as error:
            self._part(error)
            raise
        self.bytes_sent = [reducer.traffic.sent for reducer in self._reducers]
        return {name: self._updates[name].view(slot.shape) for name, slot in self._slots.items()}

    def residual(self, rank: int) -> dict[str, Tensor]:
        """Copy a rank's residual, by parameter name. It is zero where there is no error feedback."""
        return self._sessions[rank].resume.residual()

    def state_dict(self) -> dict[str, Any]:
        """Copy all that the next step depends on, of all ranks."""
        shares = {rank: session.resume.share() for rank, session in enumerate(self._sessions)}
        return state.pack(self._sessions[0].spec, len(shares), shares)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state, with the same spec and shapes.

        With another number of ranks the mean of the residuals stays the same. New ranks begin with an empty residual.

        Args:
            state: The result of state_dict(), or the list of the results of all ranks of a real run.

        Raises:
            ValueError: The state does not fit, or is damaged. Nothing of it is loaded.
        """
        self._together([session.resume.loading(state, []) for session in self._sessions])

    def stats(self) -> Stats:
        """Return figures of the last step on rank 0."""
        return self._sessions[0].reducer.stats()

    @property
    def _reducers(self) -> list[Reducer]:
        return [session.reducer for session in self._sessions]

    def _watch(self, writers: Sequence[Writer], intervals: Intervals) -> None:
        for session in self._sessions:
            watched: Any = weakref.proxy(session)  # the session has the observer
            session.observe(Observer(writers, intervals, watched))

    def _renew_updates(self) -> None:
        """Give the slots a new array for their updates. It serves until somebody holds a view of it: each costs page faults."""
        sizes = [slot.layer.size for slot in self._slots.values()]
        array = torch.empty(sum(sizes), device=self._device)
        self._storage, self._updates = array.untyped_storage(), dict(zip(self._slots, array.split(sizes), strict=True))
        for name, slot in self._slots.items():
            slot.update = self._updates[name]
        del array
        self._users = _users_of(self._storage)

    def _exchange(self, grads: Sequence[Mapping[str, Tensor | None]]) -> None:
        """Run a step of all ranks, each part of it on all of them before the next part."""
        slots, reducers = self._slots, self._reducers
        if self._optimizer is not None:
            rates = layer_rates(self._layer_of, [self._optimizer])
            for reducer in reducers:
                reducer.context.layer_rates = rates
        for reducer, of_rank in zip(reducers, grads, strict=True):
            for name, grad in of_rank.items():
                if grad is not None:
                    reducer.ready(slots[name], grad.contiguous())
        for reducer in reducers:
            reducer.start_all()
        while [reducer for reducer in reducers if reducer.advance()]:
            pass
        for reducer in reducers:
            reducer.end_step()
        for reducer in reducers:
            reducer.conclude()
        for session in self._sessions:  # a loaded state may have been of sums
            session.sums = False

    def _together(self, flows: Sequence[Flow[None]]) -> None:
        """Run the ranks' flows in lock-step. If one fails, the others end where they are, and all ranks go on alike."""
        try:
            for _ in zip(*flows, strict=True):
                pass
        except BaseException as error:
            for flow in flows:
                flow.close()
            self._board.clear()
            if not isinstance(error, ValueError):  # which leaves all as it was
                self._part(error)
            raise

    def _part(self, error: BaseException) -> None:
        """Discard the step under way after a failure. The ranks meet again before the next one."""
        self._board.clear()
        for session in self._sessions:
            session.failed(error)
            session.recover()

    def _check(self, rank: int, grads: Mapping[str, Tensor | None]) -> None:
        """Refuse wrong gradients before any rank starts, since all ranks must be at the same step."""
        for name, grad in grads.items():
            slot = self._slots.get(name)
            if slot is None:
                raise ValueError(f"rank {rank}: there is no parameter {name!r}; known: {', '.join(self._slots)}")
            if grad is None:
                continue
            if grad.shape != slot.shape:
                shapes = f"has shape {tuple(slot.shape)}, but its gradient has {tuple(grad.shape)}"
                raise ValueError(f"rank {rank}: {name!r} {shapes}")
            if grad.dtype not in GRADIENT_TYPES:
                check_type(grad, f"rank {rank}: the gradient of {name!r}")


def _users_of(storage: torch.UntypedStorage) -> int:
    """Count the tensors that share a storage. Return 0 where torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(storage._cdata))


def _is_marked(delivered: Tensor, update: Update) -> bool:
    """Decide whether a step failed, which marks the first entry of every layer. This waits for a device if there is one."""
    return not bool(update.first.isfinite()) and not bool(delivered[0].isfinite())


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Compare to the last bit. A NaN equals any other: a GPU's have bits of their own. This waits for a device."""
    if torch.equal(one.view(torch.int32), other.view(torch.int32)):
        return True
    same = (one.view(torch.int32) == other.view(torch.int32)) | (one.isnan() & other.isnan())
    return bool(same.all())


def _compare(rank: int, bucket: Bucket, of_first: Sequence[Tensor], update: Update, _: float) -> None:
    """Compare the update of a rank after the first with what the first has written."""
    for name, expected, own in zip(bucket.layout.names, of_first, update.flat.split(bucket.layout.sizes), strict=True):
        if not _are_equal(expected, own) and not (_is_marked(expected, update) and _are_equal(expected[1:], own[1:])):
            raise RuntimeError(
                f"rank {rank} has another update of {name!r} than rank 0: {bucket.compressor} is not deterministic"
            )
