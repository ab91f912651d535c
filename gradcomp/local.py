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
from gradcomp.engine.reducer import Options, Reducer
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters, Slot, Slots, check_optimizer
from gradcomp.networks import Answer, Connection
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
        fragments: The parts of the model that are exchanged in turn, each while the next every / fragments steps run.
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
        fragments: int = 1,
        seed: int = 0,
    ):
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise TypeError(_WRAPPED.format(name=type(model).__name__))
        check_optimizer(optimizer)
        if auto_of(spec) is not None:
            raise ValueError(_NOT_YET)
        self._every, count = _whole("every", every), _whole("fragments", fragments)
        weights = {slot.name: slot.parameter for slot in Parameters(model.named_parameters()).slots}
        if self._every % count or count > len(weights):
            raise ValueError(f"fragments={count} must divide every={every}, and be at most {len(weights)}, the parameters")
        rate, momentum = _number("outer_lr", outer_lr, RATE), _number("outer_momentum", outer_momentum, MOMENTUM)
        if momentum >= 1:
            raise ValueError(f"outer_momentum={outer_momentum!r} must be below 1")
        self._optimizer, self._interval = optimizer, self._every // count
        self._counts = {"steps": 0, "in_round": 0, "synchronizations": 0, "bytes_sent": 0, "bytes_sent_total": 0}
        self._under_way: _Fragment | None = None
        self._has_moved = False  # a step came since all ranks had equal weights
        self._buffers = _Buffers([(name, each) for name, each in model.named_buffers() if each.is_floating_point()])
        self._network, compressor = _network(next(iter(weights.values())).device), make(spec)
        self._fragments = [
            _Fragment(part, _Session(compressor, slots, self._network, Options(seed=seed + i), _DOOR, _View(slots)))
            for i, part in enumerate(_divided(weights, count))
            for slots in [Slots([Slot(name, each.shape, each.device) for name, each in part.items()])]
        ]
        for fragment in self._fragments:
            fragment.session.meet()
        _take_those_of_rank_0([*weights.items(), *self._buffers.named], self._network)
        for fragment in self._fragments:
            fragment.begin_at_weights(rate, momentum)
        inform(f"gradcomp: {compressor} over local steps exchanges progress after every {every} steps", self._network)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, for a GradScaler."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the optimizer. After every so many, synchronize."""
        loss = self._optimizer.step() if closure is None else self._optimizer.step(closure)
        counts = self._counts
        counts["steps"] += 1
        counts["in_round"] += 1
        self._has_moved = True
        part, rest = divmod(counts["in_round"], self._interval)
        if rest:
            self._advance()
        else:
            self._begin(part - 1)
            if len(self._fragments) == 1:
                self._apply(waits=True)
                self._has_moved = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let the optimizer forget the gradients."""
        self._optimizer.zero_grad(set_to_none)

    def flush(self) -> None:
        """Synchronize now, if there was a step since the last time: all ranks have equal weights then. All ranks call it."""
        if not self._has_moved:
            return
        for part in range(len(self._fragments)):
            self._begin(part)
            self._apply(waits=True)
        self._has_moved = False

    def stats(self) -> LocalStats:
        """Return figures of the training on this rank.

        Example:
            >>> local.stats()["bytes_sent_total"]
        """
        entries = sum(each.numel() for fragment in self._fragments for each in fragment.weights.values())
        counts, sent = self._counts, self._counts["bytes_sent_total"]
        return {
            "exchanges": f"progress of {self._every} steps",
            "steps": counts["steps"],
            "synchronizations": counts["synchronizations"],
            "bytes_sent": counts["bytes_sent"],
            "bytes_sent_total": sent,
            "compression": 4 * entries * counts["steps"] / sent if sent else None,
        }

    def state_dict(self) -> dict[str, Any]:
        """Copy all that this rank's next step depends on, its weights among it. All ranks call it, and each saves its own.

        An exchange of a fragment that is under way ends first.

        Example:
            >>> torch.save(local.state_dict(), f"rank-{rank}.pt")
        """
        self._apply(waits=False)
        return {
            "counts": dict(self._counts),
            "buffers": {name: each.clone() for name, each in self._buffers.named},
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            "fragments": [fragment.state_dict() for fragment in self._fragments],
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state, with the same spec, fragments and model. All ranks call it, between two steps.

        A list of all ranks' states serves any number of ranks: a rank without one begins at the common start, with the inner
        optimizer of rank 0.

        Args:
            state: The result of state_dict() on this rank, or the list of the results of all ranks.

        Raises:
            ValueError: The state does not fit, or is damaged.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        if not states or not all(isinstance(each, Mapping) and "fragments" in each for each in states):
            raise ValueError("load_state_dict() got no state of LocalSteps; pass the result of state_dict(), or a list of them")
        if any([f.starts.keys() for f in self._fragments] != [s["starts"].keys() for s in e["fragments"]] for e in states):
            raise ValueError(
                "the state is of a model with other parameters, or of other fragments; load it as it was saved: with the same "
                "model and fragments="
            )
        self._apply(waits=False)
        rank = self._network.world.rank
        own = states[0] if len(states) == 1 else states[rank] if rank < len(states) else None
        given = states[0] if own is None else own
        for i, fragment in enumerate(self._fragments):
            fragment.load_state_dict([each["fragments"][i] for each in states], None if own is None else own["fragments"][i])
        for name, buffer in self._buffers.named:
            buffer.copy_(given["buffers"][name])
        self._optimizer.load_state_dict(given["optimizer"])
        self._counts, self._has_moved = dict(given["counts"]), True

    def _begin(self, part: int) -> None:
        """Begin the exchange of a fragment; that of the one before ends."""
        self._apply(waits=False)
        self._under_way = self._fragments[part]
        self._under_way.begin()
        if part == len(self._fragments) - 1:
            self._counts["in_round"] = 0
            self._counts["synchronizations"] += 1
            self._buffers.begin(self._network)

    def _advance(self) -> None:
        """Go on with the exchange under way by one round. It waits only for a message that has not come yet."""
        if self._under_way is not None:
            self._under_way.session.reducer.advance()

    def _apply(self, waits: bool) -> None:
        """End the exchange under way, if any, and take its outer step. waits: no inner step came since it began."""
        if (fragment := self._under_way) is None:
            return
        self._under_way = None
        self._counts["bytes_sent"] = sent = fragment.end(waits)
        self._counts["bytes_sent_total"] += sent
        self._buffers.end()


class _Fragment:
    """A part of a model that is exchanged by itself.

    weights: by name. starts: those of the ranks' common start, in float32. sent_at: the weights when the exchange began.
    """

    def __init__(self, weights: Mapping[str, torch.nn.Parameter], session: Session):
        self.weights, self.session = weights, session
        self.starts: dict[str, Tensor] = {}
        self._progress: list[Tensor] = []
        self._sent_at: list[Tensor] = []

    def begin_at_weights(self, rate: float, momentum: float) -> None:
        """Make the present weights the common start."""
        self.starts = {name: each.detach().float().clone() for name, each in self.weights.items()}
        self._outer = torch.optim.SGD(self.starts.values(), lr=rate, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin to exchange start minus now."""
        slots = self.session.slots.slots
        self._sent_at = [each.detach().clone() for each in self.weights.values()]
        self._progress = [(self.starts[name] - each).reshape(-1) for name, each in self.weights.items()]
        self.session.begin()
        self.session.ready_all(slots, self._progress)

    @torch.no_grad()
    def end(self, waits: bool) -> int:
        """End the exchange, and take the outer step from the start. Return the bytes sent.

        The weights go to the new start, plus the inner steps that came in the meantime. waits: there were none.
        """
        self.session.finish()
        for start, mean in zip(self.starts.values(), self._progress, strict=True):
            start.grad = mean.view(start.shape)
        self._outer.step()
        self._outer.zero_grad()
        for start, weight, sent in zip(self.starts.values(), self.weights.values(), self._sent_at, strict=True):
            weight.copy_(start if waits else start + (weight - sent))
        self._progress, self._sent_at = [], []
        return self.session.reducer.bytes_sent

    def state_dict(self) -> dict[str, Any]:
        """Copy the state of the fragment on this rank."""
        return {
            "weights": {name: each.detach().clone() for name, each in self.weights.items()},
            "starts": {name: each.clone() for name, each in self.starts.items()},
            "outer": copy.deepcopy(self._outer.state_dict()),
            "exchange": self.session.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, states: Sequence[Mapping[str, Any]], own: Mapping[str, Any] | None) -> None:
        """Continue from the states of all ranks, and this rank's own, if it has one."""
        self.session.load_state_dict([each["exchange"] for each in states])
        for name, weight in self.weights.items():
            self.starts[name].copy_(states[0]["starts"][name])
            weight.copy_(self.starts[name] if own is None else own["weights"][name])
        self._outer.load_state_dict(states[0]["outer"])


class _Buffers:
    """The floating-point buffers of a model, which become their means over ranks."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]):
        self.named = named
        self._answers: list[Answer] = []

    def begin(self, network: Connection) -> None:
        """Begin to exchange them."""
        self._answers = [network.start(Reduce(each.float() / network.world.size), f"buffer {n}") for n, each in self.named]

    @torch.no_grad()
    def end(self) -> None:
        """Take the means, if an exchange is under way."""
        for (_, buffer), answer in zip(self.named, self._answers, strict=False):
            mean = answer()
            assert isinstance(mean, Tensor)
            buffer.copy_(mean)
        self._answers = []


@torch.no_grad()
def _take_those_of_rank_0(named: Sequence[tuple[str, Tensor]], network: Connection) -> None:
    """Add up rank 0's tensors and the others' zeros."""
    for name, each in named:
        own = torch.where(torch.tensor(network.world.rank == 0, device=each.device), each.detach().float(), 0.0)
        whole = network.start(Reduce(own), f"weights of {name}")()
        assert isinstance(whole, Tensor)
        each.copy_(whole)


def _divided(weights: Mapping[str, torch.nn.Parameter], count: int) -> list[dict[str, torch.nn.Parameter]]:
    """Divide a model into so many parts of neighbouring layers, of about the same size. None is empty."""
    parts: list[dict[str, torch.nn.Parameter]] = [{} for _ in range(count)]
    total, before = sum(each.numel() for each in weights.values()), 0
    for i, (name, each) in enumerate(weights.items()):
        middle = (before + each.numel() / 2) * count / max(total, 1)
        filled = next((n for n, part in enumerate(parts) if not part), count)
        part = min(max(int(middle), filled - 1, count - len(weights) + i), filled, count - 1)
        parts[part][name] = each
        before += each.numel()
    return parts


class _Reducer(Reducer):
    """The buckets of a fragment. All begin at once, and an exchange may be over before its end is asked for."""

    def start_all(self, scale: float = 1.0) -> None:
        """Start nothing: all buckets have started."""
        self.clock.note_last_gradient()


class _Session(Session):
    reducer_class = _Reducer


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


def _whole(name: str, given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, numbers.Integral) or int(given) < 1:
        raise ValueError(f"{name}={given!r} must be a whole number, 1 or more")
    return int(given)


def _number(name: str, given: Any, default: float) -> float:
    if given is None:
        return default
    if not isinstance(given, numbers.Real) or not 0 <= float(given) < float("inf"):
        raise ValueError(f"{name}={given!r} must be a number that is not negative")
    return float(given)


def __dir__() -> list[str]:
    return __all__
