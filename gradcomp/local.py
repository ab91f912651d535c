"""Local steps: the ranks train by themselves for many steps, and then exchange how far they came.

A. Douillard and others, "DiLoCo" (2023): after H steps, the mean over ranks of start minus now is the gradient of an outer step
from the common start. A. Sarfi and others, "SparseLoCo" (2025), send the largest entries of it, with error feedback.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp.core.compressor import Compressor
from gradcomp.core.requests import Reduce
from gradcomp.engine.optimizer_steps import inform
from gradcomp.engine.optimizer_view import OptimizerView
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters, Slot, Slots, check_optimizer
from gradcomp.networks import Connection
from gradcomp.networks.torch import TorchNetwork
from gradcomp.spec import auto_of, make

__all__ = ["LocalSteps"]

# The outer step, where the user leaves it open.
RATE, MOMENTUM = 0.9, 0.5

_NOT_YET = "auto chooses by the time of a step, and most local steps send nothing; write a spec, such as topk"
_NO_NETWORK = (
    "LocalSteps() found no ranks: call torch.distributed.init_process_group(), or horovod.torch.init(), before; a training on "
    "one rank does so, too"
)
_WRAPPED = "the model is a {name}, which exchanges gradients in every step; pass the model inside it, model.module"
_DOOR = Door(name="local steps")


class LocalStats(TypedDict):
    """Figures of a training by local steps on this rank.

    exchanges: what the ranks exchange, in words. steps: of the optimizer. synchronizations: done. bytes_sent: of the last one.
    bytes_sent_total: of all. compression: the bytes of all steps' gradients as float32 over bytes_sent_total; None before the
    first synchronization.
    """

    exchanges: str
    steps: int
    synchronizations: int
    bytes_sent: int
    bytes_sent_total: int
    compression: float | None


class LocalSteps:
    """An optimizer whose ranks exchange their progress every so many steps, and nothing in between.

    All ranks begin with rank 0's weights. The floating-point buffers of the model, such as BatchNorm's, become their means.

    Args:
        model: The model, without DistributedDataParallel.
        optimizer: The optimizer of its steps. A scheduler goes on to act on this one.
        spec: "name:knob=value", or a compressor.
        every: The steps from one synchronization to the next.
        outer_lr: The rate of the outer step; None: 0.9.
        outer_momentum: Its Nesterov momentum; None: 0.5.
        seed: The seed of random draws, equal on all ranks.

    Raises:
        ValueError: A spec or a number does not fit, or the ranks do not agree.
        RuntimeError: There is no network.

    Example:
        >>> local = gradcomp.local.LocalSteps(model, optimizer, "topk:ratio=0.05", every=30)
        >>> for inputs, targets in batches:
        ...     local.zero_grad()
        ...     loss_of(model(inputs), targets).backward()
        ...     local.step()
        >>> local.flush()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        spec: str | Compressor = "topk",
        *,
        every: int = 30,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        seed: int = 0,
    ):
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise TypeError(_WRAPPED.format(name=type(model).__name__))
        check_optimizer(optimizer)
        if auto_of(spec) is not None:
            raise ValueError(_NOT_YET)
        self._every: int = _steps(every)
        rate, momentum = _number("outer_lr", outer_lr, RATE), _number("outer_momentum", outer_momentum, MOMENTUM)
        if momentum >= 1:
            raise ValueError(f"outer_momentum={outer_momentum!r} must be below 1")
        self._optimizer, self._steps, self._in_round, self._rounds, self._sent = optimizer, 0, 0, 0, 0
        self._weights = {slot.name: slot.parameter for slot in Parameters(model.named_parameters()).slots}
        self._buffers = [(n, each) for n, each in model.named_buffers() if each.is_floating_point()]
        slots = Slots([Slot(name, each.shape, each.device) for name, each in self._weights.items()])
        self._network = _network(next(iter(self._weights.values())).device)
        self._session = Session(make(spec), slots, self._network, Options(seed=seed), _DOOR, _View(slots))
        self._session.meet()
        self._take_weights_of_rank_0()
        self._starts = {name: each.detach().float().clone() for name, each in self._weights.items()}
        self._outer = torch.optim.SGD(self._starts.values(), lr=rate, momentum=momentum, nesterov=momentum > 0)
        inform(f"gradcomp: {self._session.spec} over local steps exchanges progress after every {every} steps", self._network)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, for a GradScaler."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the optimizer. After every so many, synchronize."""
        loss = self._optimizer.step() if closure is None else self._optimizer.step(closure)
        self._steps, self._in_round = self._steps + 1, self._in_round + 1
        if self._in_round == self._every:
            self._synchronize()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let the optimizer forget the gradients."""
        self._optimizer.zero_grad(set_to_none)

    def flush(self) -> None:
        """Synchronize now, if there was a step since the last time: all ranks have equal weights then. All ranks call it."""
        if self._in_round:
            self._synchronize()

    def stats(self) -> LocalStats:
        """Return figures of the training on this rank.

        Example:
            >>> local.stats()["bytes_sent_total"]
        """
        dense = 4 * sum(each.numel() for each in self._weights.values()) * self._steps
        return {
            "exchanges": f"progress of {self._every} steps",
            "steps": self._steps,
            "synchronizations": self._rounds,
            "bytes_sent": self._session.reducer.bytes_sent,
            "bytes_sent_total": self._sent,
            "compression": dense / self._sent if self._sent else None,
        }

    def state_dict(self) -> dict[str, Any]:
        """Copy all that this rank's next step depends on, its weights among it. States differ between ranks: save each.

        Example:
            >>> torch.save(local.state_dict(), f"rank-{rank}.pt")
        """
        return {
            "steps": self._steps,
            "in_round": self._in_round,
            "rounds": self._rounds,
            "sent": self._sent,
            "weights": {name: each.detach().clone() for name, each in self._weights.items()},
            "buffers": {name: each.clone() for name, each in self._buffers},
            "starts": {name: each.clone() for name, each in self._starts.items()},
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            "outer": copy.deepcopy(self._outer.state_dict()),
            "exchange": self._session.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state, with the same spec and model. All ranks call it, between two steps.

        A list of all ranks' states serves any number of ranks: a rank without one begins at the common start, with the inner
        optimizer of rank 0.

        Args:
            state: The result of state_dict() on this rank, or the list of the results of all ranks.

        Raises:
            ValueError: The state does not fit, or is damaged.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        if not states or not all(isinstance(each, Mapping) and "starts" in each for each in states):
            raise ValueError("load_state_dict() got no state of LocalSteps; pass the result of state_dict(), or a list of them")
        rank, first = self._network.world.rank, states[0]
        if first["starts"].keys() != self._starts.keys():
            raise ValueError("the state is of a model with other parameters; load it into the model that saved it")
        own = first if len(states) == 1 else states[rank] if rank < len(states) else None
        self._session.load_state_dict([each["exchange"] for each in states])
        given = first if own is None else own
        with torch.no_grad():
            for name, weight in self._weights.items():
                self._starts[name].copy_(first["starts"][name])
                weight.copy_(first["starts"][name] if own is None else own["weights"][name])
            for name, buffer in self._buffers:
                buffer.copy_(given["buffers"][name])
        self._optimizer.load_state_dict(given["optimizer"])
        self._outer.load_state_dict(first["outer"])
        self._steps, self._in_round, self._rounds, self._sent = (given[n] for n in ("steps", "in_round", "rounds", "sent"))

    @torch.no_grad()
    def _synchronize(self) -> None:
        """Exchange start minus now, take the outer step from the start, and go on there."""
        session = self._session
        slots = session.slots.slots
        progress = [(self._starts[slot.name] - self._weights[slot.name]).reshape(-1) for slot in slots]
        session.begin()
        session.ready_all(slots, progress)
        session.finish()
        self._average_buffers()
        for slot, mean in zip(slots, progress, strict=True):
            self._starts[slot.name].grad = mean.view(slot.shape)
        self._outer.step()
        self._outer.zero_grad()
        for name, weight in self._weights.items():
            weight.copy_(self._starts[name])
        self._in_round, self._rounds = 0, self._rounds + 1
        self._sent += session.reducer.bytes_sent

    def _average_buffers(self) -> None:
        for name, buffer in self._buffers:
            mean = self._network.start(Reduce(buffer.float() / self._network.world.size), f"buffer {name}")()
            assert isinstance(mean, Tensor)
            buffer.copy_(mean)

    @torch.no_grad()
    def _take_weights_of_rank_0(self) -> None:
        """Add up rank 0's weights and the others' zeros."""
        for name, each in [*self._weights.items(), *self._buffers]:
            own = each.detach().float() * (self._network.world.rank == 0)
            whole = self._network.start(Reduce(own), f"weights of {name}")()
            assert isinstance(whole, Tensor)
            each.copy_(whole)


class _View(OptimizerView):
    """The view of no optimizer: the outer step is no step of a user's."""

    def note_delivered(self, *arguments: Any) -> None:
        """Do nothing: no step of a user's optimizer is to apply the updates."""


def _network(device: torch.device) -> Connection:
    """Find the ranks: torch.distributed's, or Horovod's."""
    if dist.is_available() and dist.is_initialized():
        assert dist.group.WORLD is not None
        return TorchNetwork(dist.group.WORLD, device)
    try:
        from gradcomp.networks.horovod import everyone
    except ImportError:
        raise RuntimeError(_NO_NETWORK) from None
    network: Connection = everyone()
    if not network.ready:
        raise RuntimeError(_NO_NETWORK)
    return network


def _steps(every: Any) -> int:
    if isinstance(every, bool) or not isinstance(every, numbers.Integral) or int(every) < 1:
        raise ValueError(f"every={every!r} must be a whole number of steps, 1 or more")
    return int(every)


def _number(name: str, given: Any, default: float) -> float:
    if given is None:
        return default
    if not isinstance(given, numbers.Real) or not 0 <= float(given) < float("inf"):
        raise ValueError(f"{name}={given!r} must be a number that is not negative")
    return float(given)


def __dir__() -> list[str]:
    return __all__
