"""GANs on two ranks: a discriminator that the generator's loss goes through tells fakes from real as torch alone does."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import doors
import pytest
import ranks
import torch
from doors import ALONE, COMPRESSION, DDP, DOORS, OWN, Training
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

pytestmark = pytest.mark.slow

STEPS = 150
REAL, FAKE = (1.0, 0.5), (0.0, 0.7)
RECOMMENDED = ("topk", "sdagc", "blocks", "orq", "orq:levels=9", "bingrad", "auto", "auto:loss=high")
# AdamW sees gradients late with these, and begins slowly with and without a generator.
LEFT = ("topk:momentum=0", "sdagc:momentum=0", "orq:levels=9,momentum=0", "bingrad:momentum=0")
FEW = (("topk", "adamw", 2), ("topk:momentum=0", "sgd", 2), ("sdagc", "sgd", 1))
EVERY = (
    *itertools.product(RECOMMENDED, ("sgd", "adamw"), (1, 2)),
    *itertools.product(LEFT, ("sgd",), (1, 2)),
)


def drawn(draws: torch.Generator, of: tuple[float, float], count: int = 32) -> Tensor:
    mean, deviation = of
    return torch.randn(count, 8, generator=draws) * deviation + mean


def discriminated(door: str, spec: str | None, kind: str, passes: int) -> tuple[float, float]:
    """Train a discriminator. Return its loss, and the share of fakes that it takes for real.

    passes: backward passes for its own losses. The generator's loss goes through it, too, and is dropped.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    made: Any = torch.optim.AdamW(model.parameters(), 1e-3)
    if kind == "sgd":
        made = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    run = Training(door, model, spec, inner=made)
    draws = torch.Generator().manual_seed(doors.rank(door) + 1)
    yes, no = torch.ones(32, 1), torch.zeros(32, 1)
    for _ in range(STEPS):
        run.optimizer.zero_grad()
        real, fake = drawn(draws, REAL), drawn(draws, FAKE)
        both = [(real, yes), (fake, no)] if passes == 2 else [(torch.cat([real, fake]), torch.cat([yes, no]))]
        for batch, target in both:
            (2 / passes * binary_cross_entropy_with_logits(run.whole(batch), target)).backward()
        run.optimizer.step()
        binary_cross_entropy_with_logits(run.whole(drawn(draws, FAKE)), yes).backward()
        if door != DDP:
            run.optimizer.synchronize()
    draws.manual_seed(99)
    with torch.no_grad():
        real, fake = (model(drawn(draws, of, 2000)) for of in (REAL, FAKE))
    return float(softplus(-real).mean() + softplus(fake).mean()), float((fake > 0).float().mean())


def discriminate(door: str, cases: tuple[tuple[str, str, int], ...]) -> dict[Any, tuple[float, float]]:
    """Train by every case, and as torch or Horovod alone."""
    doors.join(door)
    warnings.simplefilter("ignore")
    alone = {(None, kind): discriminated(DDP if door == DDP else ALONE, None, kind, 1) for kind in {case[1] for case in cases}}
    return alone | {case: discriminated(door, *case) for case in cases}


@pytest.mark.parametrize(
    "door, cases",
    [
        (DDP, FEW),
        (COMPRESSION, FEW[2:]),
        (OWN, (("topk", "sgd", 1),)),
        *(
            pytest.param(door, tuple(case for case in EVERY if door == DDP or case[2] == 1), marks=pytest.mark.long)
            for door in (DDP, *DOORS)
        ),
    ],
)
def test_a_discriminator_takes_fakes_for_real_as_seldom_as_alone(door: str, cases: Any) -> None:
    found, other = ranks.launch(discriminate, 2, door, cases, seconds=600)
    assert found == other, "the ranks have the same weights"
    for (spec, kind, *passes), (loss, taken) in found.items():
        print(f"{door:20} {spec!s:24} {kind:6} {passes} loss {loss:.3f}, fakes taken for real {100 * taken:.1f} %")
    for (spec, kind, *_), (loss, taken) in found.items():
        of_alone = found[None, kind]
        assert loss < of_alone[0] + 0.04 and taken < of_alone[1] + 0.01, (spec, kind, loss, taken)
