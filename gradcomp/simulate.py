"""Every rank in this process, in lock-step: trains with many ranks on one machine, and counts what each of them would send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradcomp.engine import checkpoint
from gradcomp.engine.parameters import check_momentum, rates_of
from gradcomp.engine.reducer import Bucket, Reducer, check_type
from gradcomp.native import kernels
from gradcomp.native.memory import Memory, Update
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.protocol import Compressor, Layer, Layout
from gradcomp.spec import make


class Simulation:
    """Exchanges the gradients of `world` simulated ranks, for a model with parameters of these names and shapes.

    spec: "name:knob=value", or a compressor. shapes: {name: shape}. world: how many ranks. seed: of what is drawn.
    bucket_mb: the most that layers in one bucket have, in 10^6 bytes. device: where the gradients lie.
    ranks_per_host: neighbours on one simulated host. optimizer, named_parameters: tell learning rates to specs that need them,
    and let a momentum be checked. bytes_sent: what each rank handed to the network in the last step.
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
            raise ValueError(f"world={world}: a simulation needs at least one rank")
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host={ranks_per_host}: a host has at least one rank")
        self.bytes_sent = [0] * world
        self._shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self._optimizer = optimizer
        self._named = None if named_parameters is None else dict(named_parameters)
        if optimizer is not None and (self._named is None or self._named.keys() != self._shapes.keys()):
            raise ValueError("optimizer= needs named_parameters= with the same names as shapes")
        where = torch.device(device)
        self._layers = {name: Layer(shape.numel(), where, len(shape)) for name, shape in self._shapes.items()}
        self._layout = Layout(tuple(self._layers), tuple(layer.size for layer in self._layers.values()), where)
        self._updates = _Recycled(self._layout)
        self._update: dict[str, Tensor] = {}
        self._options, self._board, self._memory = (bucket_mb, seed), Board(world), Memory()
        self._networks = [MemoryNetwork(self._board, rank, ranks_per_host) for rank in range(world)]
        self._compressor = make(spec)
        self._reducers = self._made(self._compressor)

    def _made(self, compressor: Compressor) -> list[Reducer]:
        """A reducer for each rank. They take turns, so that they share their memory."""
        rates = None
        if self._optimizer is not None and self._named is not None:
            rates = rates_of(self._optimizer, self._named.items())
            check_momentum(compressor, self._optimizer)
        return [
            Reducer(
                compressor,
                self._layers,
                network,
                *self._options,
                rates=rates,
                deliver=partial(self._deliver, rank),
                memory=self._memory,
            )
            for rank, network in enumerate(self._networks)
        ]

    def change(self, spec: str | Compressor) -> None:
        """Continue with another spec; what has not been sent yet is carried over."""
        compressor = checkpoint.carrying(make(spec), self._reducers[0])
        changed = self._made(compressor)
        for old, new in zip(self._reducers, changed, strict=True):
            checkpoint.carry(old, new)
        self._reducers, self._compressor = changed, compressor

    def step(self, grads: Sequence[Mapping[str, Tensor | None]]) -> dict[str, Tensor]:
        """Do one step: each rank's gradients by name in, the mean update out.

        A gradient that is missing or None counts as zero. All ranks compute the update, as they would on a cluster; that they
        agree to the last bit is checked.
        """
        if len(grads) != len(self._reducers):
            raise ValueError(f"gradients of {len(grads)} ranks were given, but the simulation has {len(self._reducers)}")
        for rank, own in enumerate(grads):
            self._check(rank, own)
        self._update = self._layout.views(self._updates.take())
        try:
            self._exchange(grads)
        except BaseException:
            self._board.clear()
            for reducer in self._reducers:
                reducer.abort()
            raise
        for reducer in self._reducers:
            reducer.end_step()
        self.bytes_sent = [reducer.bytes_sent for reducer in self._reducers]
        update, self._update = self._update, {}
        return {name: update[name].view(shape) for name, shape in self._shapes.items()}

    def residual(self, rank: int) -> dict[str, Tensor]:
        """Copy what this rank has not sent yet, by name; zeros where there is no error feedback."""
        kept = checkpoint.residual(self._reducers[rank])
        return {name: kept[name].view(shape) for name, shape in self._shapes.items()}

    def state_dict(self) -> dict[str, Any]:
        """Copy everything that the next step depends on, for all ranks."""
        return checkpoint.stamped(str(self._compressor), ranks=[checkpoint.save(reducer) for reducer in self._reducers])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what state_dict() gave: the same spec, shapes and number of ranks."""
        checkpoint.check_stamp(state, str(self._compressor))
        if len(state.get("ranks", [])) != len(self._reducers):
            raise ValueError(
                f"the state is of {len(state.get('ranks', []))} ranks, but the simulation has {len(self._reducers)}"
            )
        for reducer, own in zip(self._reducers, state["ranks"], strict=True):
            checkpoint.load(reducer, own)

    def stats(self) -> dict[str, Any]:
        """Give figures of rank 0's last step."""
        return self._reducers[0].stats()

    def _exchange(self, grads: Sequence[Mapping[str, Tensor | None]]) -> None:
        for rank, own in enumerate(grads):
            for name, grad in own.items():
                if grad is not None:
                    self._reducers[rank].mark_ready(name, grad.contiguous())
        for reducer in self._reducers:
            reducer.start_all()
        while [reducer for reducer in self._reducers if reducer.advance()]:
            pass

    def _check(self, rank: int, own: Mapping[str, Tensor | None]) -> None:
        """Refuse what is wrong before any rank has begun, for ranks must stay in step."""
        for name, grad in own.items():
            if name not in self._shapes:
                raise ValueError(f"rank {rank}: there is no parameter {name!r}; known: {', '.join(self._shapes)}")
            if grad is None:
                continue
            if grad.shape != self._shapes[name]:
                raise ValueError(
                    f"rank {rank}: {name!r} is of shape {tuple(self._shapes[name])}, its gradient {tuple(grad.shape)}"
                )
            check_type(grad, f"rank {rank}: the gradient of {name!r}")

    def _deliver(self, rank: int, bucket: Bucket, update: Update) -> None:
        if rank == 0:
            kernels.spread(update.flat, [self._update[name] for name in bucket.layout.names], marks=update.marks)
            return
        for name, own in bucket.layout.views(update.flat).items():
            if not torch.equal(self._update[name].view(torch.int32), own.view(torch.int32)):
                raise RuntimeError(
                    f"rank {rank} came to another update of {name!r} than rank 0: {self._compressor} is not deterministic"
                )


class _Recycled:
    """One flat array, handed out again once nobody holds a view of it: a fresh one costs more in page faults than a step."""

    def __init__(self, layout: Layout):
        self._flat = torch.empty(layout.total, device=layout.device)
        self._users = getattr(torch._C, "_storage_Use_Count", None)
        self._alone = self._count()

    def _count(self) -> int:
        return int(self._users(self._flat.untyped_storage()._cdata)) if self._users else 0

    def take(self) -> Tensor:
        if not self._users or self._count() > self._alone:
            self._flat = torch.empty_like(self._flat)
        return self._flat
