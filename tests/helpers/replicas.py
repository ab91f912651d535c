"""Ranks in one process that exchange as under DDP: each has weights, an optimizer and a session of its own, in a thread.

A session takes part in the steps of its own rank's optimizer alone: torch's hooks would call the sessions of all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from threads import Generation, ThreadNetwork
from torch import Tensor, nn
from torch.optim import Optimizer
from training import SHAPES, STEPS, Named, OptimizerOf, Trained, draw, mean

from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters
from gradcomp.engine.updates.steps import ignore
from gradcomp.spec import make

T = TypeVar("T")


class Replica:
    """One rank. session: None trains alone."""

    def __init__(self, optimizer_of: OptimizerOf, shapes: Mapping[str, Sequence[int]], size: float, form: torch.dtype):
        generator = torch.Generator().manual_seed(1)
        drawn = {name: size * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        self.weights = {name: nn.Parameter(each.to(form)) for name, each in drawn.items()}
        made = optimizer_of(self.weights.values())
        self.optimizers: list[Optimizer] = [*made] if isinstance(made, (list, tuple)) else [made]
        self.session: Any = None

    @property
    def optimizer(self) -> Optimizer:
        (only,) = self.optimizers
        return only

    def join(self, network: Any, spec: str, options: Options) -> None:
        """Make the session."""
        door = Door(has_optimizers=True)
        self.session = Session(make(spec), Parameters(self.weights.items()), network, options, door)

    def backward(self, grads: Mapping[str, Tensor | None]) -> None:
        """Take gradients as a backward pass gives them. Layers without one keep what they have, and frozen ones get none."""
        session = self.session
        for name, grad in grads.items():
            weight = self.weights[name]
            weight.grad = None if grad is None or not weight.requires_grad else grad.to(weight.dtype, copy=True)
        if session is None:
            return
        session.gradients.begin()
        there = [each for each in self.weights.values() if each.grad is not None and each.numel()]
        if session.reducer.on_updates:
            for each in there:
                session.updates.gradients.add((each.grad,))
            if (poison := session.updates.end_backward()) is not None and there:
                there[0].grad.view(-1)[:1].add_(poison)
            session.updates.note_backward()
        else:
            for each in there:
                session.gradients.ready(session.slot(each))
            session.gradients.finish()

    def begin(self, optimizer: Optimizer) -> None:
        """Begin a step, as the hook before it does."""
        if (momentum := self.session.updates.before(optimizer)) is not None:
            momentum.hide()

    def step(self, optimizer: Optimizer | None = None, closure: Callable[[], Any] | None = None) -> None:
        """Take a step with one optimizer, or with all."""
        exchanges = self.session is not None and self.session.reducer.on_updates
        for each in self.optimizers if optimizer is None else [optimizer]:
            if exchanges:
                self.begin(each)
            try:
                each.step(closure) if closure is not None else each.step()
            except BaseException:
                if exchanges:
                    self.session.updates.give_up(each)
                raise
            if exchanges:
                self.session.updates.after(each)


class Replicas(Trained):
    """The ranks of one training; without a spec, one that trains alone by the mean gradient."""

    def __init__(
        self,
        spec: str | None,
        optimizer_of: OptimizerOf,
        shapes: Mapping[str, Sequence[int]] = SHAPES,
        ranks: int = 1,
        size: float = 0.3,
        *,
        form: torch.dtype = torch.float32,
        hosts: int | None = None,
        **options: Any,
    ):
        self.spec, self.shapes, self.count = spec, shapes, ranks
        self._made = optimizer_of, shapes, size, form
        self._hosts, self._options = hosts or ranks, options
        self.ranks = [Replica(*self._made) for _ in range(1 if spec is None else ranks)]
        if spec is not None:
            generation = Generation(ranks)
            for number, rank in enumerate(self.ranks):
                network = ThreadNetwork(generation, number, f"host {number * self._hosts // ranks}")
                rank.join(network, spec, Options(**options))

    def each(self, call: Callable[[Replica], T]) -> list[T]:
        """Call on all ranks at once. Raise the first error of any, once all have ended."""
        for rank in self.ranks if self.spec is not None else ():
            ignore(rank.session)
        if len(self.ranks) == 1:
            return [call(self.ranks[0])]
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            outcomes = [pool.submit(call, rank) for rank in self.ranks]
        return [each.result() for each in outcomes]

    def exchange(self, grads: Sequence[Named]) -> None:
        """Run a backward pass of all ranks."""
        given = grads if self.spec is not None else [mean(grads)]
        every = iter(zip(self.ranks, given, strict=True))
        of_rank = {id(rank): own for rank, own in every}
        self.each(lambda rank: rank.backward(of_rank[id(rank)]))

    def step(self, grads: Sequence[Named] | None = None) -> Replicas:
        """Run a backward pass, if there are gradients, and a step."""
        if grads is not None:
            self.exchange(grads)
        self.each(lambda rank: rank.step())
        return self

    def train(self, steps: int = STEPS, first: int = 0, alike: bool = False) -> Replicas:
        """Take steps with drawn gradients. The weights of all ranks are equal after each."""
        for number in range(first, first + steps):
            self.step(draw(number, self.shapes, self.count, alike))
            self.check_equal()
        return self

    def check_equal(self) -> None:
        """Hold that all ranks have the same weights, to the bit."""
        for rank in self.ranks[1:]:
            for name, weight in rank.weights.items():
                assert torch.equal(weight.detach(), self.weights[name].detach()), name

    @property
    def weights(self) -> dict[str, nn.Parameter]:  # type: ignore[override]
        return self.ranks[0].weights

    @property
    def optimizer(self) -> Optimizer:
        return self.ranks[0].optimizer

    def copied(self) -> Named:
        """Copy the weights in double precision."""
        return {name: weight.detach().double() for name, weight in self.weights.items()}

    def residual(self) -> Named:
        """Return the mean of the ranks' residuals, in double precision."""
        every = [rank.session.resume.residual() for rank in self.ranks]
        return {name: torch.stack([own[name].double() for own in every]).mean(0) for name in self.shapes}

    def set(self, **settings: Any) -> None:
        """Write settings of the groups of all optimizers."""
        for rank in self.ranks:
            for optimizer in rank.optimizers:
                for group in optimizer.param_groups:
                    group.update(copy.deepcopy(settings))

    def freeze(self, *names: str) -> None:
        """Freeze these layers, and no others."""
        for rank in self.ranks:
            for name, weight in rank.weights.items():
                weight.requires_grad_(name not in names)

    def change(self, spec: str) -> None:
        self.each(lambda rank: rank.session.resume.change(make(spec)))

    def states(self) -> list[dict[str, Any]]:
        """Copy what every rank saves: weights, optimizers, and the exchange."""
        return [
            {
                "weights": {name: weight.detach().clone() for name, weight in rank.weights.items()},
                "optimizers": copy.deepcopy([each.state_dict() for each in rank.optimizers]),
                "exchange": None if rank.session is None else copy.deepcopy(rank.session.resume.state_dict()),
            }
            for rank in self.ranks
        ]

    def resumed(self, ranks: int | None = None) -> Replicas:
        """Make a training of as many ranks, or of another number, that goes on from this one's states."""
        again, states = Replicas(self.spec, *self._of(ranks), hosts=ranks or self._hosts, **self._options), self.states()
        for number, rank in enumerate(again.ranks):
            state = states[min(number, len(states) - 1)]
            for name, weight in rank.weights.items():
                weight.data.copy_(state["weights"][name])
            for optimizer, of_rank in zip(rank.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(copy.deepcopy(of_rank))
        if self.spec is not None:
            exchanges = [each["exchange"] for each in states]
            again.each(lambda rank: rank.session.resume.load_state_dict(exchanges))
        return again

    def _of(self, ranks: int | None) -> tuple[Any, ...]:
        optimizer_of, shapes, size, _ = self._made
        return optimizer_of, shapes, ranks or self.count, size
