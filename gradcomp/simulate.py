"""The simulator: runs the sessions of all ranks in one process, in lock-step, and counts the bytes that each would send."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Compressor, Layout
from gradcomp.engine import state
from gradcomp.engine.bucket import GRADIENT_TYPES, Bucket, check_type
from gradcomp.engine.changed_gradients import UpdateSample
from gradcomp.engine.meeting import Flow
from gradcomp.engine.optimizer_steps import StepListener, listen
from gradcomp.engine.optimizer_view import OptimizerView
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options, Reducer, Stats
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Slot, Slots, checked
from gradcomp.native.memory import Memory, Update
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make
from gradcomp.telemetry.observer import Intervals, Observer, Writer


class Simulation:
    """The exchanges of simulated ranks, for one model.

    An optimizer that steps with step()'s updates as its gradients, unchanged, leaves its momentum to the simulation. With other
    gradients, as in a training that the simulation only watches, the optimizer steps as it would alone.

    Args:
        spec: "name:knob=value", or a compressor.
        shapes: The shapes of the model's parameters, by name.
        world: The number of ranks.
        seed: The seed of random draws.
        bucket_mb: The largest size of a bucket of several layers, in 10^6 bytes.
        device: The device of the gradients.
        ranks_per_host: The number of ranks on each simulated host.
        optimizer: The source of learning rates, for specs that need them, and of the momentum.
        named_parameters: The optimizer's parameters, with the names of shapes.

    Attributes:
        bytes_sent: The bytes that each rank handed to the network in the last step.

    Raises:
        ValueError: A spec, a shape or a number does not fit.

    Example:
        >>> simulation = gradcomp.Simulation("topk:ratio=0.5", {"w": (4,)}, world=2)
        >>> update = simulation.step([{"w": torch.randn(4)}, {"w": torch.randn(4)}])["w"]
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
        named = {} if named_parameters is None else dict(checked(named_parameters))
        if optimizer is not None and named.keys() != shapes.keys():
            raise ValueError("optimizer= needs named_parameters= with the same names as shapes")
        device = torch.device(device)
        self._slots = {name: Slot(name, shape, device, named.get(name)) for name, shape in shapes.items()}
        sizes = tuple(slot.layer.size for slot in self._slots.values())
        self._updates = _Updates(Layout(tuple(self._slots), sizes, device), self._slots)
        self._board, options = Board(world), Options(optimizer, None, bucket_mb, seed, memory=Memory())
        slots = Slots([*self._slots.values()])
        self._view, compressor = _View(slots, optimizer, ranks=world), make(spec)
        self._sessions: list[_Rank] = []
        for rank in range(world):
            network, first = MemoryNetwork(self._board, rank, ranks_per_host), self._sessions[0] if rank else None
            self._sessions.append(_Rank(compressor, slots, network, options, self._view, first))
        self._steps = _OptimizerSteps(self._view, self._updates)
        if optimizer is not None:
            listen(self._steps)

    def change(self, spec: str | Compressor) -> None:
        """Continue with another spec. Residuals are carried over.

        Args:
            spec: "name:knob=value", or a compressor.
        """
        compressor = make(spec)
        self._together([session.replacing(compressor) for session in self._sessions])

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
        updates = self._updates.take()
        try:
            if not self._sessions[0].has_met:
                self._together([session.meeting() for session in self._sessions])
            self._exchange(grads)
        except BaseException as error:
            self._board.clear()
            for session in self._sessions:
                session.failed(error)
                session.recover()
            raise
        self.bytes_sent = [reducer.bytes_sent for reducer in self._reducers]
        return {name: updates[name].view(slot.shape) for name, slot in self._slots.items()}

    def residual(self, rank: int) -> dict[str, Tensor]:
        """Copy a rank's residual, by parameter name. It is zero where there is no error feedback."""
        return self._sessions[rank].residual()

    def state_dict(self) -> dict[str, Any]:
        """Copy all that the next step depends on, of all ranks."""
        shares = {rank: session.share() for rank, session in enumerate(self._sessions)}
        return state.pack(self._sessions[0].spec, len(shares), shares)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state, with the same spec and shapes.

        With another number of ranks the sum of the residuals stays the same. New ranks begin with an empty residual, and the
        mean of Adam's moments.

        Args:
            state: The result of state_dict(), or the list of the results of all ranks of a training.

        Raises:
            ValueError: The state does not fit, or is damaged. Nothing of it is loaded.
        """
        self._together([session.loading(state) for session in self._sessions])

    def stats(self) -> Stats:
        """Return figures of the last step on rank 0."""
        return self._sessions[0].reducer.stats()

    @property
    def _reducers(self) -> list[Reducer]:
        return [session.reducer for session in self._sessions]

    def _watch(self, writers: Sequence[Writer], intervals: Intervals) -> None:
        for session in self._sessions:
            watched: Any = weakref.proxy(session)  # the session has the observer
            session.observe(Observer(writers, intervals, watched), str(intervals))

    def _exchange(self, grads: Sequence[Mapping[str, Tensor | None]]) -> None:
        """Run a step of all ranks, each part of it on all of them before the next part."""
        slots, reducers = self._slots, self._reducers
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
        if len(reducers) > 1:  # a loaded state may have been of sums
            self._view.sums = False

    def _together(self, flows: Sequence[Flow[None]]) -> None:
        """Run the ranks' flows in lock-step. If one fails, the others end where they are."""
        try:
            for _ in zip(*flows, strict=True):
                pass
        finally:
            for flow in flows:
                flow.close()

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


class _View(OptimizerView):
    """The view of an optimizer that all simulated ranks share. It may step with other gradients than the updates."""

    def __init__(self, slots: Slots, optimizer: torch.optim.Optimizer | None, ranks: int):
        super().__init__(slots, optimizer, ranks=ranks)
        self._sample, self._drives = UpdateSample([]), False

    @property
    def update_waits(self) -> bool:
        """False: no step of the optimizer has to apply an update."""
        return False

    def owns(self, parameter: Tensor) -> bool:
        """Return False: the exchange of a training counts, and not the one that is simulated beside it."""
        return False

    def note_exchange(self) -> None:
        """Do nothing. See owns()."""

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        self._drives = True
        super().before_step(optimizer, closure)

    def arrays_to_hand_back(self) -> tuple[str, ...]:
        """List them if the optimizer has stepped with updates. Otherwise it has moments of its own."""
        return super().arrays_to_hand_back() if self._drives else ()


class _OptimizerSteps(StepListener):
    """The listener to the optimizer's steps. Only those with the last step's updates are the simulation's."""

    def __init__(self, view: _View, updates: _Updates):
        self.view, self._updates = view, updates

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Take the momentum out of an optimizer that steps with the last step's updates."""
        if self.view.taken and optimizer is self.view.acting and self._are_gradients():
            self.view.before_step(optimizer, closure)

    def after_step(self) -> None:
        """Show the optimizer's values again."""
        self.view.show()

    def _are_gradients(self) -> bool:
        """Decide whether the last step's updates are the parameters' gradients. A gradient of None may be anything."""
        for name, update in self._updates.by_name.items():
            if (grad := self.view.slots.parameters[name].grad) is not None:
                flat = grad.detach().reshape(-1).to(update.device)
                if not torch.allclose(update.to(flat.dtype), flat, rtol=0, atol=0, equal_nan=True):
                    return False
        return True


class _Rank(Session):
    """The session of a simulated rank. The update of rank 0 is returned, and the others' are compared with it."""

    def __init__(
        self,
        compressor: Compressor,
        slots: Slots,
        network: MemoryNetwork,
        options: Options,
        view: OptimizerView,
        first: _Rank | None,
    ):
        self._first = first
        if first is not None:
            self.reducer_class = _ComparingReducer
        super().__init__(compressor, slots, network, options, Door(), view)

    def _listen(self) -> None:
        """Leave the optimizer's steps to the simulation."""

    def _make_reducer(self, compressor: Compressor) -> Reducer:
        reducer = super()._make_reducer(compressor)
        if self._first is not None:
            reducer.delivery = self._first.reducer.delivery
        return reducer


class _ComparingReducer(Reducer):
    """The reducer of a rank whose updates are compared with those of rank 0."""

    def _deliver(self, bucket: Bucket, update: Update) -> None:
        for name, of_layer in bucket.layout.views(update.flat).items():
            expected = self.slots[name].update
            assert expected is not None
            if not torch.equal(expected.view(torch.int32), of_layer.view(torch.int32)):
                raise RuntimeError(
                    f"rank {self.network.world.rank} has another update of {name!r} than rank 0: {bucket.compressor} is not "
                    "deterministic"
                )


class _Updates:
    """The array of a step's updates, which is reused once nobody holds a view of it: a new one costs many page faults.

    by_name: the slots' parts of it, in which they get their updates.
    """

    def __init__(self, layout: Layout, slots: Mapping[str, Slot]):
        self._layout, self._slots = layout, slots
        self._count = getattr(torch._C, "_storage_Use_Count", None)
        self._renew()

    def take(self) -> dict[str, Tensor]:
        """Return the array by name if it is free, else a new one."""
        if self._count is None or self._count(self._storage._cdata) > self._own_users:
            self._renew()
        return self.by_name

    def _renew(self) -> None:
        array = torch.empty(self._layout.total, device=self._layout.device)
        self._storage, self.by_name = array.untyped_storage(), self._layout.views(array)
        for name, slot in self._slots.items():
            slot.update = self.by_name[name]
        del array
        self._own_users = self._count(self._storage._cdata) if self._count else 0
