"""Prints a digest of some steps of every configuration, computed by one build of the kernels: python -m step_digests MODULE."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SHAPES = {"a": (70, 61), "b": (9,), "c": (33, 130), "d": (2048,)}
RANKS, STEPS = 3, 4


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def sgd_with_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


# Beside the configurations that the laws are held over: an optimizer, the type of the gradients, and specs.
Optimizer = Callable[[Any], torch.optim.Optimizer]
MORE: list[tuple[Optimizer, torch.dtype, str]] = [
    (sgd, torch.float32, "topk:ratio=0.05,momentum=0.9"),
    (sgd, torch.float32, "orq:levels=9,clip=0.5"),
    (sgd, torch.bfloat16, "topk:ratio=0.1,clip=1,clip_by=model"),
    (sgd, torch.float16, "half"),
    (sgd_with_momentum, torch.float32, "topk:ratio=0.05"),
    (sgd_with_momentum, torch.bfloat16, "sdagc"),
    (adamw, torch.float32, "topk:ratio=0.05"),
    (adamw, torch.bfloat16, "sdagc"),
    (adamw, torch.float16, "orq:levels=5"),
]


def digest(optimizer_of: Optimizer, form: torch.dtype, spec: str) -> str:
    """Return the digest of all updates, and of what waits at the end."""
    import gradcomp

    named = {name: torch.nn.Parameter(torch.zeros(shape, dtype=form)) for name, shape in SHAPES.items()}
    optimizer = optimizer_of(named.values())
    simulation = gradcomp.Simulation(spec, SHAPES, RANKS, optimizer=optimizer, named_parameters=list(named.items()))
    generator, found = torch.Generator().manual_seed(0), hashlib.sha256()
    for _ in range(STEPS):
        grads = [
            {name: (torch.empty(shape).log_normal_(0, 2, generator=generator) - 3).to(form) for name, shape in SHAPES.items()}
            for _ in range(RANKS)
        ]
        for update in simulation.step(grads).values():
            found.update(update.contiguous().float().numpy().tobytes())
    for rank in range(RANKS):
        for residual in simulation.residual(rank).values():
            found.update(residual.contiguous().numpy().tobytes())
    return found.hexdigest()


def main(module: Path) -> None:
    from fuzz.run import load

    load(module)
    torch.set_num_threads(1)
    from specs import ALL

    configurations = [*((sgd, torch.float32, spec) for spec in ALL), *MORE]
    print(json.dumps({f"{made.__name__} {form} {spec}": digest(made, form, spec) for made, form, spec in configurations}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
