"""A training with known gradients: by a simulation's updates, or, without a spec, torch's own by the mean gradient."""

from __future__ import annotations

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


class Trained:
    """A training that has weights by name."""

    weights: Any

    def ends_as(self, other: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
        """Hold that the weights are the other training's; to the bit where the tolerances are 0."""
        for name, weight in self.weights.items():
            torch.testing.assert_close(weight, other.weights[name], rtol=rtol, atol=atol)


class Training(Trained):
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
        self.shapes, self.ranks, self._options = shapes, ranks, options
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
