"""Prints a digest of some steps of every configuration, computed by one build of the kernels: python -m step_digests MODULE."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

SHAPES = {"a": (70, 61), "b": (9,), "c": (33, 130), "d": (2048,)}
RANKS, STEPS = 3, 4
# Beside the configurations that the laws are held over.
MORE = [
    "topk:ratio=0.05,momentum=0.9",
    "sdagc:momentum=0.9,nesterov=true",
    "orq:levels=9,clip=0.5",
    "topk:ratio=0.1,clip=1,clip_by=model",
]


def digest(spec: str) -> str:
    """Return the digest of all updates, and of what waits at the end."""
    import gradcomp

    optimizer_rates = torch.optim.SGD([torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()], 0.1)
    named = dict(zip(SHAPES, optimizer_rates.param_groups[0]["params"], strict=True))
    simulation = gradcomp.Simulation(spec, SHAPES, RANKS, optimizer=optimizer_rates, named_parameters=list(named.items()))
    generator, found = torch.Generator().manual_seed(0), hashlib.sha256()
    for _ in range(STEPS):
        grads = [
            {name: torch.empty(shape).log_normal_(0, 2, generator=generator) - 3 for name, shape in SHAPES.items()}
            for _ in range(RANKS)
        ]
        for update in simulation.step(grads).values():
            found.update(update.contiguous().numpy().tobytes())
    for rank in range(RANKS):
        for residual in simulation.residual(rank).values():
            found.update(residual.contiguous().numpy().tobytes())
    return found.hexdigest()


def main(module: Path) -> None:
    from fuzz.run import load

    load(module)
    torch.set_num_threads(1)
    from specs import ALL

    print(json.dumps({spec: digest(spec) for spec in [*ALL, *MORE]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
