"""The simulator: runs all ranks in one process, in lock-step, and counts the bytes that each of them would send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.core.compressor import Compressor, Layer, Layout
from gradcomp.engine.bucket import Bucket, check_type
from gradcomp.engine.optimizers.check import check_momentum, is_linear, rates_of
from gradcomp.engine.optimizers.own_momentum import OwnMomentum
from gradcomp.engine.parameters import checked
from gradcomp.engine.return_moments import average_moments, moments_to_return, return_moments
from gradcomp.engine.sessions.freezes import Freezes
from gradcomp.engine.sessions.meeting import adopt, shared_state
from gradcomp.engine.state import (
    Place,
    States,
    carry,
    load_shares,
    pack,
    residuals,
    save_share,
    shape_texts,
    successor,
)
from gradcomp.engine.steps.reducer import Reducer
from gradcomp.native.memory import Memory, Update
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make
from gradcomp.telemetry.observer import Intervals, Observer, Writer


class _Watched(NamedTuple):
    """The exchange of a simulation, for observers."""

    simulation: Simulation

    @property
    def spec(self) -> str:
        return str(self.simulation._compressor)

    @property
    def reducer(self) -> Reducer:
        return self.simulation._reducers[0]


class Simulation:
    """The exchanges of simulated ranks, for one model.

    spec: "name:knob=value", or a compressor. shapes: {name: shape} of the model's parameters. world: the number of ranks.
    seed: the seed of random draws. bucket_mb: the largest size of a bucket of several layers, in 10^6 bytes.
    device: the device of the gradients. ranks_per_host: the number of ranks on each simulated host.
    optimizer, named_parameters: the source of learning rates, for specs that need them, and of the momentum. An optimizer that
    steps with step()'s updates as its gradients, unchanged, leaves its momentum to the simulation. With other gradients, as in
    a training that the simulation only watches, the optimizer steps as it would alone.

    bytes_sent holds the bytes that each rank handed to the network in the last step.
    """

    def __init__(
        self,
        spec: str | Compressor,
        shapes: Mapping[str, Sequence[int]],
        world: int,
        seed: int = 0,
        *,
        bucket_mb: float = 25,
        device: str | torch.device = "cpu",
        ranks_per_host: int = 1,
        optimizer: torch.optim.Optimizer | None = None,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    ):
        if world < 1:
            raise ValueError(f"world={world} must be at least 1: a simulation needs at least one rank")
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host={ranks_per_host} must be at least 1")
        self.bytes_sent = [0] * world
        self._shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self._optimizer = optimizer
        self._named = None if named_parameters is None else dict(checked(named_parameters))
        if optimizer is not None and (self._named is None or self._named.keys() != self._shapes.keys()):
            raise ValueError("optimizer= needs named_parameters= with the same names as shapes")
        device = torch.device(device)
        self._layers = {name: Layer(shape.numel(), device, len(shape)) for name, shape in self._shapes.items()}
        self._layout = Layout(tuple(self._layers), tuple(layer.size for layer in self._layers.values()), device)
        self._update_array = _ReusedArray(self._layout)
        self._update: dict[str, Tensor] = {}
        self._options, self._board, self._memory = (bucket_mb, seed), Board(world), Memory()
        self._networks = [MemoryNetwork(self._board, rank, ranks_per_host) for rank in range(world)]
        self._momentum: OwnMomentum | None = None
        if optimizer is not None and self._named is not None:
            applies = partial(_are_gradients, self._update_array, self._layout, self._named)
            self._momentum = OwnMomentum(lambda: optimizer, self._named, _flat, simulated=world, applies=applies)
        self._compressor = make(spec)
        self._reducers = self._make_reducers(self._compressor)
        self._observers: list[Observer] = []

    def _make_reducers(self, compressor: Compressor) -> list[Reducer]:
        """Make a reducer for each rank. They share one memory, since they take turns."""
        rates, linear = None, partial(is_linear, self._optimizer)
        if self._optimizer is not None and self._named is not None:
            rates = rates_of(self._optimizer, self._named.items())
            check_momentum(compressor, self._optimizer)
        frozen = Freezes(self._named).of if self._named else lambda names: ()
        reducers: list[Reducer] = []
        for rank, network in enumerate(self._networks):
            options: dict[str, Any] = {"rates": rates, "linear": linear, "memory": self._memory, "momentum": self._momentum}
            options["frozen"] = frozen
            if reducers:  # the update of rank 0 is returned, and the others' are compared with it
                options |= {"delivery": reducers[0].delivery, "deliver": partial(self._compare, rank)}
            reducers.append(Reducer(compressor, self._layers, network, *self._options, targets=self._targets, **options))
        return reducers

    def change(self, spec: str | Compressor) -> None:
        """Continue with another spec. Residuals are carried over.

        spec: "name:knob=value", or a compressor.
        """
        compressor = successor(make(spec), self._reducers[0])
        changed = self._make_reducers(compressor)
        for old, new in zip(self._reducers, changed, strict=True):
            carry(old, new)
        if self._momentum and (arrays := moments_to_return(self._momentum, self._reducers[0], changed[0])):
            wait, *_ = [average_moments(self._momentum, old, arrays) for old in self._reducers]
            return_moments(self._momentum, wait(), changed, lambda name, flat: flat.view(self._shapes[name]))
        self._reducers, self._compressor = changed, compressor
        self._observe()

    def step(self, grads: Sequence[Mapping[str, Tensor | None]]) -> dict[str, Tensor]:
        """Run one step, and return the mean update by name.

        grads: {name: gradient} for each rank. A gradient that is missing or None counts as zero.
        All ranks compute the update, as on a cluster. An error is raised unless they agree to the last bit.
        """
        if len(grads) != len(self._reducers):
            raise ValueError(
                f"step() got gradients of {len(grads)} ranks, but the simulation has {len(self._reducers)}; pass one dict "
                "for each rank"
            )
        for rank, of_rank in enumerate(grads):
            self._check(rank, of_rank)
        self._update = self._layout.views(self._update_array.take())
        try:
            self._exchange(grads)
        except BaseException:
            self._board.clear()
            for reducer in self._reducers:
                reducer.abort()
            raise
        for reducer in self._reducers:
            reducer.end_step()
        for observer in self._observers:
            observer.conclude()
        self.bytes_sent = [reducer.bytes_sent for reducer in self._reducers]
        update, self._update = self._update, {}
        return {name: update[name].view(shape) for name, shape in self._shapes.items()}

    def _watch(self, writers: Sequence[Writer], intervals: Intervals) -> None:
        self._observers = [Observer(writers, intervals, _Watched(self)) for _ in self._reducers]
        self._observe()

    def _observe(self) -> None:
        for reducer, observer in zip(self._reducers, self._observers, strict=False):  # none, or one for each
            reducer.observer = observer

    def residual(self, rank: int) -> dict[str, Tensor]:
        """Copy a rank's residual, by parameter name. It is zero where there is no error feedback."""
        flat = residuals(self._reducers[rank])
        return {name: flat[name].view(shape) for name, shape in self._shapes.items()}

    def state_dict(self) -> dict[str, Any]:
        """Copy all that the next step depends on, of all ranks."""
        shapes = shape_texts(self._shapes)
        shares = {rank: save_share(reducer, shapes) for rank, reducer in enumerate(self._reducers)}
        return pack(str(self._compressor), len(shares), shares)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state, with the same spec and shapes.

        state: the result of state_dict(), or the list of the results of all ranks of a training. With another number of ranks
        the sum of what waits stays the same. New ranks begin with nothing that waits, and the mean of Adam's moments.
        """
        world = len(self._reducers)
        loaded = States(state, str(self._compressor))
        shapes, copies = shape_texts(self._shapes), []
        for rank, reducer in enumerate(self._reducers):
            taken = loaded.take(Place(rank, world))
            copies.append(load_shares(reducer, shapes, taken.shares, loaded.steps, taken.factor, adam=taken.adam))
        for copy in copies:
            copy()
        if world > loaded.ranks:
            shared = shared_state(self._reducers[0])
            for reducer in self._reducers:
                adopt(reducer, shared)

    def stats(self) -> dict[str, Any]:
        """Return figures of the last step on rank 0."""
        return self._reducers[0].stats()

    def _exchange(self, grads: Sequence[Mapping[str, Tensor | None]]) -> None:
        for rank, of_rank in enumerate(grads):
            for name, grad in of_rank.items():
                if grad is not None:
                    self._reducers[rank].mark_ready(name, grad.contiguous())
        for reducer in self._reducers:
            reducer.start_all()
        while [reducer for reducer in self._reducers if reducer.advance()]:
            pass

    def _check(self, rank: int, grads: Mapping[str, Tensor | None]) -> None:
        """Refuse wrong gradients before any rank starts, since all ranks must be at the same step."""
        for name, grad in grads.items():
            if name not in self._shapes:
                raise ValueError(f"rank {rank}: there is no parameter {name!r}; known: {', '.join(self._shapes)}")
            if grad is None:
                continue
            if grad.shape != self._shapes[name]:
                raise ValueError(
                    f"rank {rank}: {name!r} has shape {tuple(self._shapes[name])}, but its gradient has {tuple(grad.shape)}"
                )
            check_type(grad, f"rank {rank}: the gradient of {name!r}")

    def _targets(self, bucket: Bucket) -> list[Tensor]:
        return [self._update[name] for name in bucket.layout.names]

    def _compare(self, rank: int, bucket: Bucket, update: Update) -> None:
        for name, of_layer in bucket.layout.views(update.flat).items():
            if not torch.equal(self._update[name].view(torch.int32), of_layer.view(torch.int32)):
                raise RuntimeError(
                    f"rank {rank} has another update of {name!r} than rank 0: {self._compressor} is not deterministic"
                )


def _are_gradients(array: _ReusedArray, layout: Layout, named: Mapping[str, torch.nn.Parameter]) -> bool:
    """Decide whether the last step's updates are the parameters' gradients. A gradient of None may be anything."""
    for name, update in layout.views(array.flat).items():
        if (grad := named[name].grad) is not None:
            flat = grad.detach().reshape(-1).to(update.device)
            if not torch.allclose(update.to(flat.dtype), flat, rtol=0, atol=0, equal_nan=True):
                return False
    return True


def _flat(name: str, tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)


class _ReusedArray:
    """A flat array that is reused once nobody holds a view of it. A new one costs more in page faults than a step."""

    def __init__(self, layout: Layout):
        self.flat = torch.empty(layout.total, device=layout.device)
        self._count_users = getattr(torch._C, "_storage_Use_Count", None)
        self._users_without_views = self._users()

    def _users(self) -> int:
        return int(self._count_users(self.flat.untyped_storage()._cdata)) if self._count_users else 0

    def take(self) -> Tensor:
        """Return the array if it is free, else a new one."""
        if not self._count_users or self._users() > self._users_without_views:
            self.flat = torch.empty_like(self.flat)
        return self.flat
