"""The law of conservation, held against a simulation's next step, and gradients that are huge, but finite, for one step."""

from __future__ import annotations

from collections.abc import Callable

import gradients
import torch
from reference import LARGEST, same
from torch import Tensor

import gradcomp

Named = dict[str, Tensor]
SHAPES = {"conv": (8, 3, 3, 3), "weight": (40, 31), "bias": (31,), "empty": (0, 4), "scalar": (), "wide": (2, 700)}
CPU = torch.device("cpu")


def draw(kind: str, seed: int, world: int, device: torch.device = CPU) -> list[Named]:
    """Every rank's gradients."""
    return [
        {
            name: gradients.draw(kind, torch.Size(shape).numel(), seed + 1000 * rank + i, world).view(shape).to(device)
            for i, (name, shape) in enumerate(SHAPES.items())
        }
        for rank in range(world)
    ]


def mean(parts: list[Named], name: str) -> Tensor:
    """In double precision."""
    return torch.stack([part[name].double().cpu() for part in parts]).sum(0) / len(parts)


def residuals(simulation: gradcomp.Simulation) -> list[Named]:
    """Every rank's."""
    ranks = range(len(simulation._reducers))
    return [{name: left.cpu() for name, left in simulation.residual(rank).items()} for rank in ranks]


def check_conservation(simulation: gradcomp.Simulation, grads: list[Named], decay: float = 1.0) -> Named:
    """mean(acc before) == mean(acc after) + update, up to the rounding of one addition per rank and one division.

    An entry of a residual that would be above LARGEST stands there, and the law does not hold for it. decay: the spec's.
    """
    world = len(grads)
    before = [{name: decay * each for name, each in own.items()} for own in residuals(simulation)]
    update = simulation.step(grads)
    after = residuals(simulation)
    for name, slot in simulation._slots.items():
        wanted = mean(before, name) + mean(grads, name)
        found = mean(after, name) + update[name].double().cpu()
        sizes = [part[name].abs().double().cpu() for part in (*before, *grads, *after, *[update] * world)]
        rounding = 2.0**-23 * sum(sizes, torch.zeros(slot.shape)) + 1e-44 * world
        full = sum((part[name].abs() >= LARGEST for part in after), torch.zeros(slot.shape, dtype=torch.bool))
        assert (((wanted - found).abs() <= rounding) | full).all(), f"{name}: {(wanted - found).abs().max()}"
    return update


def check_resumes(make: Callable[[], gradcomp.Simulation], world: int) -> None:
    """Hold that a simulation which loads the state gives the same updates as the one that goes on."""
    first, second = make(), make()
    for step in range(3):
        first.step(draw("normal", step, world))
    second.load_state_dict(first.state_dict())
    for step in range(3, 6):
        grads = draw("laplace", step, world)
        ours, theirs = first.step(grads), second.step(grads)
        assert all(same(ours[name], theirs[name]) for name in SHAPES)


def _everywhere(grads: list[Named], size: float) -> None:
    for own in grads:
        for name, grad in own.items():
            own[name] = torch.where(grad < 0, -size, size)


def _everywhere_1e38(grads: list[Named]) -> None:
    _everywhere(grads, 1e38)


def _one_entry(grads: list[Named]) -> None:
    for own in grads:
        own["weight"][3, 4] = 1e38


def _one_rank(grads: list[Named]) -> None:
    _everywhere(grads[-1:], 3e38)


def _all_ranks(grads: list[Named]) -> None:
    _everywhere(grads, 3e38)


# Spikes. Each replaces a step's gradients, in place.
SPIKES: dict[str, Callable[[list[Named]], None]] = {
    "1e38 everywhere": _everywhere_1e38,
    "one entry of 1e38": _one_entry,
    "3e38 on one rank": _one_rank,
    "3e38 everywhere": _all_ranks,
}
