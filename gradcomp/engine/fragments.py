"""Fragments: the parts of a model whose progress ranks exchange by turns, and all that they share at a synchronization."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.core.requests import Reduce
from gradcomp.engine.session import Session
from gradcomp.networks import Answer, Connection


class Fragment:
    """A part of a model that is exchanged by itself.

    weights: by name. starts: those of the ranks' common start, in float32. was_spoilt_here: this rank's progress was not finite
    in the last exchange.
    """

    def __init__(self, weights: Mapping[str, torch.nn.Parameter], session: Session):
        self.weights, self.session, self.was_spoilt_here = weights, session, False
        self.starts: dict[str, Tensor] = {}
        self._progress: list[Tensor] = []
        self._sent_at: list[Tensor] = []  # the weights when the exchange began; none where no inner step follows

    def begin_at_weights(self, rate: float, momentum: float) -> None:
        """Make the present weights the common start."""
        self.starts = {name: each.detach().float().clone() for name, each in self.weights.items()}
        self._outer = torch.optim.SGD(self.starts.values(), lr=rate, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def begin(self, keeps_sent: bool) -> None:
        """Begin to exchange start minus now. keeps_sent: inner steps may come before the end."""
        self._sent_at = [each.detach().clone() for each in self.weights.values()] if keeps_sent else []
        # A rank with 16-bit weights began at the rounded start.
        self._progress = [(self.starts[name].to(each.dtype).float() - each).reshape(-1) for name, each in self.weights.items()]
        self.was_spoilt_here = not all(bool(each.isfinite().all()) for each in self._progress)
        self.session.begin()
        self.session.ready_all(self.session.slots.slots, self._progress)

    @torch.no_grad()
    def end(self) -> bool:
        """End the exchange, and take the outer step from the start. Return False if the mean was not finite: there is none.

        The weights go to the start, plus the inner steps that came in the meantime.
        """
        self.session.finish()
        succeeded = not self.session.reducer.deliveries.has_failed()
        if succeeded:
            for start, mean in zip(self.starts.values(), self._progress, strict=True):
                start.grad = mean.view(start.shape)
            self._outer.step()
            self._outer.zero_grad()
        sent_at = self._sent_at if succeeded else []
        for i, (start, weight) in enumerate(zip(self.starts.values(), self.weights.values(), strict=True)):
            weight.copy_(start + (weight - sent_at[i]) if sent_at else start)
        self._progress, self._sent_at = [], []
        return succeeded

    def state_dict(self) -> dict[str, Any]:
        """Copy the state of the fragment on this rank."""
        return {
            "weights": {name: each.detach().clone() for name, each in self.weights.items()},
            "starts": {name: each.clone() for name, each in self.starts.items()},
            "outer": copy.deepcopy(self._outer.state_dict()),
            "exchange": self.session.resume.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, states: Sequence[Mapping[str, Any]], own: Mapping[str, Any] | None) -> None:
        """Continue from the states of all ranks, and this rank's own, if it has one."""
        self.session.resume.load_state_dict([each["exchange"] for each in states])
        for name, weight in self.weights.items():
            self.starts[name].copy_(states[0]["starts"][name])
            weight.copy_(self.starts[name] if own is None else own["weights"][name])
        own_groups = [{name: value for name, value in group.items() if name != "params"} for group in self._outer.param_groups]
        self._outer.load_state_dict(states[0]["outer"])
        for group, settings in zip(self._outer.param_groups, own_groups, strict=True):
            group.update(settings)


def with_those_gone(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Number the states of a fragment anew if some ranks' are missing, and add theirs, without anything that waits.

    The parts that the others keep then weigh in a mean as before, at any number of ranks.
    """
    exchanges = [saved.table(each, "exchange") for each in states]
    shares = [(rank, share) for each in exchanges for rank, share in saved.table(each, "of_rank").items()]
    missing = saved.read_int(exchanges[0], "ranks", 1) - len(shares)
    if missing <= 0 or len(shares) > len({rank for rank, _ in shares}):  # a rank's that comes twice is refused
        return [*states]
    numbered = [
        {**each, "of_rank": {str(i): share}} for i, (each, (_, share)) in enumerate(zip(exchanges, shares, strict=True))
    ]
    gone = {**shares[0][1], "layers": _zeros(saved.table(shares[0][1], "layers"))}
    numbered += [{**exchanges[0], "of_rank": {str(len(shares) + i): gone}} for i in range(missing)]
    return [{**states[min(i, len(states) - 1)], "exchange": each} for i, each in enumerate(numbered)]


def _zeros(value: Any) -> Any:
    return {key: _zeros(each) for key, each in value.items()} if isinstance(value, Mapping) else value * 0


class Buffers:
    """The floating-point buffers of a model, which become their means over ranks, plus what changed in the meantime."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._sent: Tensor | None = None
        self._answer: Answer | None = None

    @property
    def named(self) -> list[tuple[str, Tensor]]:
        """The buffers of now: a module may put another tensor in a buffer's place."""
        return [(name, each) for name, each in self._model.named_buffers() if each.is_floating_point()]

    def _flat(self) -> Tensor:
        return torch.cat([each.detach().float().reshape(-1) for _, each in self.named])

    def begin(self, network: Connection) -> None:
        """Begin to exchange them."""
        if self.named:
            self._sent = self._flat()
            self._answer = network.start(Reduce(self._sent / network.world.size), "buffers")

    @torch.no_grad()
    def end(self) -> int:
        """Take the means, if an exchange is under way. Return the bytes sent."""
        if self._answer is None or self._sent is None:
            return 0
        mean = self._answer()
        assert isinstance(mean, Tensor)
        own = (mean + (self._flat() - self._sent)).split([each.numel() for _, each in self.named])
        for (_, buffer), values in zip(self.named, own, strict=True):
            buffer.copy_(values.view(buffer.shape))
        self._answer = self._sent = None
        return 4 * mean.numel()


class RollCall:
    """The numbers by which ranks tell each other what each of them begins. They travel as the first message of an exchange.

    Ranks that begin unlike exchanges would wait for each other's messages, or read one for another.
    """

    def __init__(self, network: Connection):
        self._network = network
        self._answer: Answer | None = None

    def begin(self, *own: int) -> None:
        """Begin to exchange the numbers. They are as many on all ranks."""
        of_ranks = torch.zeros(self._network.world.size, len(own), device=self._network.device)
        of_ranks[self._network.world.rank] = torch.tensor(own, dtype=torch.float32)
        self._width = len(own)
        self._answer = self._network.start(Reduce(of_ranks.view(-1)), "the roll call of local steps")

    def end(self) -> list[list[int]]:
        """Return the numbers of all ranks, once; an empty list later."""
        answer, self._answer = self._answer, None
        if answer is None:
            return []
        numbers = answer()
        assert isinstance(numbers, Tensor)
        return [[int(each) for each in own] for own in numbers.view(-1, self._width).tolist()]


@torch.no_grad()
def take_those_of_rank_0(named: Sequence[tuple[str, Tensor]], network: Connection) -> None:
    """Add up rank 0's tensors and the others' zeros."""
    leads = network.world.rank == 0
    for name, each in named:
        if each.is_floating_point():
            own = each.detach().float() if leads else torch.zeros_like(each, dtype=torch.float32)
            whole = network.start(Reduce(own.clone()), f"weights of {name}")()
            assert isinstance(whole, Tensor)
            if not leads:
                each.copy_(whole)


def divided(weights: Mapping[str, torch.nn.Parameter], count: int) -> list[dict[str, torch.nn.Parameter]]:
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
