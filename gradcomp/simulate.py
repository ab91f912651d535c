"""Every rank in this process, in lock-step: trains with many ranks on one machine, and counts what each of them would send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradcomp import checkpoint, kernels
from gradcomp.compressors import make
from gradcomp.core import Compressor, Gather, Layer, Layout, Payload, Reduce, Reply, Request, Send, World
from gradcomp.reducer import Bucket, Reducer


class Board:
    """Where the ranks of a simulation leave their requests and find the answers."""

    def __init__(self, world: int):
        self.world = world
        self._requests: dict[str, list[Request | None]] = {}
        self._replies: dict[str, list[Reply]] = {}

    def post(self, name: str, rank: int, request: Request) -> None:
        requests = self._requests.setdefault(name, [None] * self.world)
        requests[rank] = request

    def collect(self, name: str, rank: int) -> Reply:
        if name not in self._replies:
            self._replies[name] = self._answer(name, self._requests.pop(name))
        replies = self._replies[name]
        if rank == self.world - 1:
            del self._replies[name]
        return replies[rank]

    def _answer(self, name: str, requests: list[Request | None]) -> list[Reply]:
        first = requests[0]
        if any(type(request) is not type(first) for request in requests):
            kinds = ", ".join(type(request).__name__ for request in requests)
            raise RuntimeError(f"exchange {name}: the ranks ask for different things ({kinds})")
        match first:
            case Gather():
                payloads: list[Payload] = [r.payload for r in requests if isinstance(r, Gather)]
                if len({payload.form for payload in payloads}) > 1:
                    raise RuntimeError(f"exchange {name}: the ranks' payloads have different forms")
                return [payloads] * self.world
            case Reduce(tensor, scale):
                for request in requests[1:]:
                    assert isinstance(request, Reduce)
                    tensor += request.tensor  # it was given away
                return [tensor.mul_(scale)] * self.world
            case Send():
                sends = [r for r in requests if isinstance(r, Send)]
                replies: list[Reply] = []
                for me, own in enumerate(sends):
                    came = {rank: each.parts[me] for rank, each in enumerate(sends) if me in each.parts}
                    own.check(came, name)
                    replies.append(came)
                return replies
        raise TypeError(f"exchange {name}: {first!r} is no request")


class Seat:
    """One rank's access to the board: the network its reducer sees."""

    def __init__(self, board: Board, rank: int, ranks_per_host: int):
        self._board = board
        self.world = World(rank, board.world, tuple(rank // ranks_per_host for rank in range(board.world)))

    def start(self, request: Request, name: str) -> str:
        self._board.post(name, self.world.rank, request)
        return name

    def finish(self, handle: str) -> Reply:
        return self._board.collect(handle, self.world.rank)


class Simulation:
    """Exchanges the gradients of `world` simulated ranks, for a model with parameters of these names and shapes."""

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
    ):
        if world < 1:
            raise ValueError(f"a simulation needs at least one rank, not {world}")
        if ranks_per_host < 1:
            raise ValueError(f"a host has at least one rank, not {ranks_per_host}")
        self.spec = str(spec)
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.bytes_sent = [0] * world
        where = torch.device(device)
        layers = {name: Layer(shape.numel(), where, len(shape)) for name, shape in self.shapes.items()}
        self._layout = Layout(tuple(layers), tuple(layer.size for layer in layers.values()), where)
        self._updates = _Recycled(self._layout)
        self._update: dict[str, Tensor] = {}
        self._layers, self._options, self._board = layers, (bucket_mb, seed), Board(world)
        self._seats = [Seat(self._board, rank, ranks_per_host) for rank in range(world)]
        self.reducers = self._reducers(make(spec))

    def _reducers(self, compressor: Compressor) -> list[Reducer]:
        return [
            Reducer(compressor, self._layers, seat, partial(self._deliver, rank), *self._options)
            for rank, seat in enumerate(self._seats)
        ]

    def change(self, spec: str | Compressor) -> None:
        """Continues with another spec; what has not been sent yet is carried over."""
        changed = self._reducers(checkpoint.carrying(make(spec), self.reducers[0]))
        for old, new in zip(self.reducers, changed, strict=True):
            checkpoint.carry(old, new)
        self.reducers, self.spec = changed, str(spec)

    def step(self, grads: Sequence[Mapping[str, Tensor | None]]) -> dict[str, Tensor]:
        """One step: each rank's gradients by name in, the mean update out. A gradient that is missing or None counts as zero.

        All ranks compute the update, as they would on a cluster; that they agree to the last bit is checked.
        """
        if len(grads) != len(self.reducers):
            raise ValueError(f"gradients of {len(grads)} ranks were given, but the simulation has {len(self.reducers)}")
        self._update = self._layout.views(self._updates.take())
        for rank, own in enumerate(grads):
            self._put(rank, own)
        for reducer in self.reducers:
            reducer.start_all()
        while [reducer for reducer in self.reducers if reducer.advance()]:
            pass
        for reducer in self.reducers:
            reducer.end_step()
        self.bytes_sent = [reducer.bytes_sent for reducer in self.reducers]
        update, self._update = self._update, {}
        return {name: update[name].view(shape) for name, shape in self.shapes.items()}

    def residual(self, rank: int) -> dict[str, Tensor]:
        """What this rank has not sent yet, by name; zeros where there is no error feedback."""
        kept = checkpoint.residual(self.reducers[rank])
        return {name: kept[name].view(shape) for name, shape in self.shapes.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, for all ranks."""
        return {"spec": self.spec, "ranks": [checkpoint.save(reducer) for reducer in self.reducers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what state_dict() gave: the same spec, shapes and number of ranks."""
        if len(state["ranks"]) != len(self.reducers):
            raise ValueError(f"the state is of {len(state['ranks'])} ranks, but the simulation has {len(self.reducers)}")
        checkpoint.same_spec(state["spec"], self.spec)
        for reducer, own in zip(self.reducers, state["ranks"], strict=True):
            checkpoint.load(reducer, own)

    def stats(self) -> dict[str, Any]:
        """What rank 0 did in the last step."""
        return self.reducers[0].stats()

    def _put(self, rank: int, own: Mapping[str, Tensor | None]) -> None:
        for name, grad in own.items():
            if name not in self.shapes:
                raise ValueError(f"rank {rank}: there is no parameter {name!r}; known: {', '.join(self.shapes)}")
            if grad is None:
                continue
            if grad.shape != self.shapes[name]:
                raise ValueError(
                    f"rank {rank}: {name!r} is of shape {tuple(self.shapes[name])}, its gradient {tuple(grad.shape)}"
                )
            self.reducers[rank].put(name, grad.contiguous())

    def _deliver(self, rank: int, bucket: Bucket, update: Tensor) -> None:
        if rank == 0:
            kernels.spread(update, [self._update[name] for name in bucket.layout.names])
            return
        for name, own in bucket.layout.views(update).items():
            if not torch.equal(self._update[name].view(torch.int32), own.view(torch.int32)):
                raise RuntimeError(
                    f"rank {rank} came to another update of {name!r} than rank 0: {self.spec} is not deterministic"
                )
        kernels.wipe(update)


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
