"""Fragments: the parts of a model whose progress ranks exchange by turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.engine.meeting import Flow
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Slot, Slots
from gradcomp.engine.state import residual_views, saved_residual
from gradcomp.engine.weight_copies import WeightCopies

_OF_GRADIENTS = (
    "{spec} has a momentum, or clip=, which are for gradients, and would act on all progress: leave them out, and write "
    "outer_momentum= or clip the gradients before local.step()"
)


class Fragment:
    """A part of a model that is exchanged by itself.

    weights: by name. starts: those of the ranks' common start, in float32; those that need no gradient are frozen in the
    exchange under way. copies: in the optimizer's state.

    What an exchange does not send stays in the rank's own weights, and in the residual: the next inner steps go on from there,
    and do not make the same progress again.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.nn.Parameter],
        copies: WeightCopies,
        make: Callable[[Slots], Session],
        rate: float,
        momentum: float,
    ):
        self.weights, self.copies = weights, copies
        self.starts = {name: torch.nn.Parameter(each.detach().float().clone()) for name, each in weights.items()}
        self.session = make(Slots([Slot(name, each.shape, each.device, each) for name, each in self.starts.items()]))
        for feedback in [bucket.feedback for bucket in self.session.reducer.buckets]:
            if feedback is not None and (feedback.traits.momentum or feedback.clip):
                raise ValueError(_OF_GRADIENTS.format(spec=feedback))
        self._outer = torch.optim.SGD(self.starts.values(), lr=rate, momentum=momentum, nesterov=momentum > 0)
        self._progress: list[Tensor] = []
        self._sent_at: list[Tensor] = []  # the weights when the exchange began; none where no inner step follows
        # The layers whose weights went on from the start minus the residual. One that rests stays where it was.
        self._kept: set[str] = set()

    @torch.no_grad()
    def begin_at_weights(self) -> None:
        """Make the present weights the common start."""
        for start, weight in zip(self.starts.values(), self.weights.values(), strict=True):
            start.copy_(weight)

    @torch.no_grad()
    def moved(self) -> list[bool]:
        """Say which layers this rank has moved since the last exchange."""
        # A rank with 16-bit weights began at the rounded ones.
        return [not torch.equal(begun.to(own.dtype), own) for begun, own in self._begun()]

    def _begun(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield where each of this rank's weights was after the last exchange, in float32, and the weight."""
        waiting = residual_views(self.session.reducer) if self._kept else {}
        for (name, start), own in zip(self.starts.items(), self.weights.values(), strict=True):
            yield start - waiting[name].view(start.shape) if name in self._kept & waiting.keys() else start, own

    @torch.no_grad()
    def begin(self, moved: Sequence[bool], keeps_sent: bool) -> None:
        """Begin to exchange the progress. moved: the layers to exchange. keeps_sent: inner steps may come before the end."""
        self._sent_at = [each.detach().clone() for each in self.weights.values()] if keeps_sent else []
        self._progress = [(begun.to(own.dtype).float() - own).reshape(-1) for begun, own in self._begun()]
        for start, moves in zip(self.starts.values(), moved, strict=True):
            start.requires_grad_(moves)
        with self.session.noting_failure():
            self.session.gradients.begin()
            self.session.gradients.ready_all(self.session.slots.slots, self._progress)

    @torch.no_grad()
    def end(self, moved: Sequence[bool], keeps_own: bool) -> bool:
        """End the exchange, and take the outer step from the start. Return False if the mean was not finite: nothing moves.

        The weights go to the start, plus the inner steps that came in the meantime. moved: the layers that any rank has moved;
        the outer step leaves the others alone. keeps_own: what this rank has not sent stays in its weights, too.
        """
        with self.session.noting_failure():  # also of an error in the outer step: another rank's start may have moved
            self.session.gradients.finish()
            succeeded = all(bool(each.isfinite().all()) for each in self._progress)  # which are the means now
            if succeeded:
                for start, mean, moves in zip(self.starts.values(), self._progress, moved, strict=True):
                    start.grad = mean.view(start.shape) if moves else None
                self._outer.step()
                self._outer.zero_grad()
                moving = {name for name, moves in zip(self.starts, moved, strict=True) if moves}
                self._kept = self._kept | moving if keeps_own else set()
                self._move(self._sent_at)
        self._progress, self._sent_at = [], []
        return succeeded

    @torch.no_grad()
    def go_back(self, forgets: bool) -> None:
        """Return to the common start. forgets: the optimizer's moments are not finite, and begin anew."""
        if forgets:
            self.copies.forget([*self.weights.values()])
        self._kept = set()
        self._move([])

    def _move(self, sent_at: Sequence[Tensor]) -> None:
        """Move the weights and their copies to where they begin, plus what came since these weights were sent."""
        copies = self.copies.find([*self.weights.values()])
        for i, (begun, weight) in enumerate(self._begun()):
            new = begun + (weight - sent_at[i]) if sent_at else begun
            self.copies.move(copies, weight, new)
            weight.copy_(new)

    @property
    def is_finite(self) -> bool:
        """Say whether this rank's weights are finite."""
        return all(bool(each.isfinite().all()) for each in self.weights.values())

    def state_dict(self) -> dict[str, Any]:
        """Copy the state of the fragment on this rank."""
        momenta: dict[str, Tensor | None] = {}
        if self._outer.defaults["momentum"]:
            momenta = {name: self._outer.state.get(each, {}).get("momentum_buffer") for name, each in self.starts.items()}
        return {
            "weights": {name: each.detach().clone() for name, each in self.weights.items()},
            "starts": {name: each.detach().clone() for name, each in self.starts.items()},
            "momenta": {n: torch.zeros_like(self.starts[n].data) if m is None else m.clone() for n, m in momenta.items()},
            "exchange": self.session.resume.state_dict(),
            "kept": sorted(self._kept),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a rank's state that does not fit. What is exchanged is checked by its session."""
        if "kept" in state:
            saved.names(state, "kept")
        momenta = saved.table(state, "momenta")
        for name, weight in self.weights.items():
            saved.tensor(saved.table(state, "weights"), name, weight.shape, dtype=weight.dtype, what=f"the weight {name!r}")
            of_start = {"starts": saved.table(state, "starts")} | ({"momenta": momenta} if momenta else {})
            for of, table in of_start.items():
                saved.tensor(table, name, weight.shape, dtype=torch.float32, what=f"{name!r} of the {of}")

    def loading(self, states: Sequence[Mapping[str, Any]], facts: list[str]) -> Flow[None]:
        """Load the exchange of all ranks' states. See Resume.loading()."""
        return self.session.resume.loading([saved.entry(each, "exchange") for each in states], facts)

    @torch.no_grad()
    def load_state_dict(self, first: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Continue from the first rank's state and this rank's own, if it has one. Both were checked.

        The optimizer has its state already. A rank without one has the first rank's, and moves it to the common start.
        """
        self._outer.state.clear()
        kept = set() if own is None or "kept" not in own else {*own["kept"]}  # an older version has no such entry
        stays = own is not None and own["exchange"]["ranks"] == self.session.network.world.size
        self._kept = kept if stays else set()
        for name, weight in self.weights.items():
            self.starts[name].copy_(first["starts"][name])
            weight.copy_((first if own is None else own)["weights"][name])
            if own is not None and name in kept - self._kept:  # the residuals have gone to other ranks
                weight.add_(saved_residual(own["exchange"], name, weight))
            if first["momenta"] and self._outer.defaults["momentum"]:
                self._outer.state[self.starts[name]]["momentum_buffer"] = first["momenta"][name].to(weight.device, copy=True)
        if own is None:
            self._move([])


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
