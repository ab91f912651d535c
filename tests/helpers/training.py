"""A training with known gradients: by a simulation's updates, or, without a spec, torch's own by the mean gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gradcomp

Named = dict[str, Tensor]
OptimizerOf = Callable[..., Any]
STEPS = 12
# Two linear layers.
SHAPES = {"0.weight": (5, 7), "0.bias": (5,), "1.weight": (3, 5), "1.bias": (3,)}


def draw(seed: int, shapes: Mapping[str, Sequence[int]] = SHAPES, ranks: int = 1, alike: bool = False) -> list[Named]:
    """Draw the gradients of each rank. alike: with the same ones on all ranks, the mean of Adam's directions is Adam's."""
    generator = torch.Generator().manual_seed(100 + seed)
    every = [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(ranks)]
    return every[:1] * ranks if alike else every


def mean(grads: Sequence[Named]) -> Named:
    """Average the ranks' gradients."""
    return {name: torch.stack([own[name] for own in grads]).mean(0) for name in grads[0]}


class Training:
    """Weights, their optimizer, and a simulation of the ranks, which is None without a spec. size: of the first weights."""

    def __init__(
        self,
        spec: str | None,
        optimizer_of: OptimizerOf,
        shapes: Mapping[str, Sequence[int]] = SHAPES,
        ranks: int = 1,
        size: float = 0.3,
        **options: Any,
    ):
        torch.manual_seed(1)
        self.shapes, self.ranks, self._optimizer_of, self._options = shapes, ranks, optimizer_of, options
        self.weights = {name: nn.Parameter(size * torch.randn(shape)) for name, shape in shapes.items()}
        self.optimizer: torch.optim.Optimizer = optimizer_of(self.weights.values())
        self.simulation: Any = None if spec is None else self.simulate(spec)

    def simulate(self, spec: str) -> gradcomp.Simulation:
        """Make a simulation that knows the optimizer."""
        known: Any = {"optimizer": self.optimizer, "named_parameters": self.weights.items()}
        return gradcomp.Simulation(spec, self.shapes, self.ranks, **known, **self._options)

    def step(self, grads: Sequence[Named]) -> Named:
        """Move the weights, and return the update."""
        updates: Named = mean(grads) if self.simulation is None else self.simulation.step(grads)
        self.apply(updates)
        return updates

    def apply(self, updates: Named) -> None:
        """Step with copies of the updates as gradients."""
        for name, weight in self.weights.items():
            weight.grad = updates[name].clone()
        self.optimizer.step()

    def train(self, steps: int = STEPS, first: int = 0, alike: bool = True) -> Training:
        """Take steps with drawn gradients, and return this training."""
        for number in range(first, first + steps):
            self.step(draw(number, self.shapes, self.ranks, alike))
        return self

    def resumed(self, spec: str | None, ranks: int | None = None) -> Training:
        """Make a training with these weights, this optimizer's state, and this simulation's, where there is one."""
        again = Training(None, self._optimizer_of, self.shapes, ranks or self.ranks, **self._options)
        again.copy(self)
        if spec is not None:
            again.simulation = again.simulate(spec)
            if self.simulation is not None:
                again.simulation.load_state_dict(self.simulation.state_dict())
        return again

    def copy(self, other: Training) -> None:
        """Take another training's weights and its optimizer's state."""
        for name, weight in self.weights.items():
            weight.data.copy_(other.weights[name].detach())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def ends_as(self, other: Training, rtol: float = 1e-4, atol: float = 1e-5) -> None:
        """Hold that the weights are the other training's; to the bit where the tolerances are 0."""
        for name, weight in self.weights.items():
            torch.testing.assert_close(weight, other.weights[name], rtol=rtol, atol=atol)

    def layers(self, stage: str) -> list[dict[str, Any]]:
        """Return the part of each rank's state that a stage saves by layer."""
        return [share["layers"].get(stage, {}) for share in self.simulation.state_dict()["of_rank"].values()]
