"""lgc in steps small enough for tests: gradients that ranks share in part, and simulations that have learned their codes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import gradcomp

SHAPES = {"conv1.weight": (16, 1, 3, 3), "a.weight": (64, 32, 3, 3), "a.bias": (64,), "fc.weight": (10, 64), "fc.bias": (10,)}
# Entries that travel as codes: neither the first layer nor the last.
MIDDLE = 64 * 32 * 9 + 64


def common(seed: int = 0) -> dict[str, Tensor]:
    """Draw the part of the gradients that all ranks share."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 3
        for name, shape in SHAPES.items()
    }


def draw(step: int, world: int = 4, scale: float = 1.0) -> list[dict[str, Tensor]]:
    """Draw every rank's gradients: the common part, and noise of its own."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [
        {name: scale * (part + 0.3 * torch.randn(part.shape, generator=generator)) for name, part in common().items()}
        for _ in range(world)
    ]


def spec_of(knobs: str, learn: int = 15) -> str:
    """Name an lgc that has a dense step, then learns for so many steps."""
    return f"lgc:dense=1,learn={learn},ratio=0.01,window=2048{',' if knobs else ''}{knobs}"


@functools.cache
def state_after_learning(knobs: str, world: int) -> dict[str, Any]:
    """Return the state just before the first step with codes."""
    simulation = gradcomp.Simulation(spec_of(knobs), SHAPES, world)
    for step in range(16):
        simulation.step(draw(step, world))
    assert simulation.stats()["phase"] == "learn"
    return simulation.state_dict()


def learned(knobs: str = "", world: int = 4) -> gradcomp.Simulation:
    """Make a simulation whose next step is the first with codes."""
    simulation = gradcomp.Simulation(spec_of(knobs), SHAPES, world)
    simulation.load_state_dict(state_after_learning(knobs, world))
    return simulation


def states(simulation: gradcomp.Simulation) -> list[Any]:
    """Return every rank's state of lgc."""
    return [reducer.buckets[0].inner for reducer in simulation._reducers]
