"""Measure the errors of ways to round gradients, on those of a text's transformer, beside the Microscaling formats.

Each rank's gradient is rounded once, and the ranks' mean once more. The error is squared, over the square of the mean.
For Adam, which divides an entry by its own size, each entry's error is over its second moment.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import gradcomp
from gradcomp.core.wrapper import Wrapper
from gradcomp.exchanges.rounded import Rounded
from gradcomp.messages import payload as payloads
from laboratory import options, report
from laboratory.harness import settings
from laboratory.machine import ROOT
from laboratory.options import Refused
from laboratory.report import Progress, columns
from laboratory.tasks.table import TASKS, files, load, place
from laboratory.tasks.task import Job, optimizer_of
from laboratory.timing import threads

TASK = "shakespeare"
SPECS = "half;blocks:bits=3;blocks:bits=4;blocks;blocks:bits=6;orq:levels=9;orq:levels=5"
# The steps after which gradients are rounded.
STEPS = (10, 50, 150)
GROUP = 32

EXAMPLES = """\
example:
  scripts/lab rounding --data FOLDER --set lr=0.002,width=128,depth=3      # three minutes"""

Round = Callable[[Tensor], Tensor]


class Format(NamedTuple):
    """A Microscaling format: bits of exponent and mantissa, and the largest number."""

    exponent: int
    mantissa: int
    largest: float

    def numbers(self) -> Tensor:
        """List the format's numbers from 0 on."""
        bias, steps = 2 ** (self.exponent - 1) - 1, 2**self.mantissa
        found = [step / steps * 2.0 ** (1 - bias) for step in range(steps)]
        found += [(1 + step / steps) * 2.0 ** (e - bias) for e in range(1, 2**self.exponent) for step in range(steps)]
        return torch.tensor([number for number in found if number <= self.largest])


# Open Compute Project, OCP Microscaling Formats (MX) Specification, version 1.0.
FORMATS = {"MXFP8": Format(4, 3, 448.0), "MXFP6": Format(2, 3, 7.5), "MXFP4": Format(2, 1, 6.0)}


def microscaling(form: Format, x: Tensor) -> Tensor:
    """Round each entry to the nearest number of a format, times a power of two for 32 entries, as the specification has it."""
    groups = pad(x, (0, -len(x) % GROUP)).view(-1, GROUP)
    most = groups.abs().amax(1, keepdim=True)
    scale: Tensor = (most.clamp_min(2.0**-120).log2().floor() - math.floor(math.log2(form.largest))).exp2()
    numbers = form.numbers()
    near = numbers[torch.bucketize((groups / scale).abs(), (numbers[1:] + numbers[:-1]) / 2)]
    said: Tensor = (near * groups.sign() * scale).flatten()[: len(x)]
    return said


def even(bits: int, x: Tensor) -> Tensor:
    """Round each entry to the nearest of 2^bits - 1 even levels up to the largest magnitude of 32."""
    groups, last = pad(x, (0, -len(x) % GROUP)).view(-1, GROUP), 2 ** (bits - 1) - 1
    step: Tensor = groups.abs().amax(1, keepdim=True).clamp_min(2.0**-120) / last
    said: Tensor = ((groups / step).round() * step).flatten()[: len(x)]
    return said


def by_compressor(spec: str, x: Tensor) -> Tensor:
    """Round as a compressor does."""
    rounding = rounded(spec).rounding(len(x))
    said = torch.zeros_like(x)
    rounding.add(said, [rounding.take(x.clone(), None, None, key=1)], 1.0)
    return said


def rounded(spec: str) -> Rounded:
    """Return a spec's compressor, without its wrappers."""
    made = gradcomp.make(spec)
    while isinstance(made, Wrapper):
        made = made.inner
    if not isinstance(made, Rounded):
        raise Refused(f"--specs: {spec} does not round every entry")
    return made


def ways(specs: Sequence[str], n: int) -> list[tuple[str, float, Round]]:
    """List the ways to round n entries, with the bits that they take for each."""
    found: list[tuple[str, float, Round]] = [
        (name, 1 + form.exponent + form.mantissa + 8 / GROUP, partial(microscaling, form)) for name, form in FORMATS.items()
    ]
    found += [(f"even levels, {bits} bits", bits + 8 / GROUP, partial(even, bits)) for bits in (4, 5, 6)]
    return found + [
        (spec, 8 * payloads.size(rounded(spec).rounding(n).form) / n, partial(by_compressor, spec)) for spec in specs
    ]


def gradient(job: Job, parameters: Sequence[Tensor], rank: int) -> Tensor:
    """Compute the gradient of a rank's next batch, flat."""
    x, y = next(job.batches[rank])
    return torch.cat([each.flatten() for each in torch.autograd.grad(job.loss(job.model(x), y), parameters)])


def errors(grads: Tensor, way: Round) -> tuple[float, float]:
    """Return the squared error of a way, over the square of the mean, and the mean of each entry's over its second moment."""
    mean = grads.double().mean(0)
    error = (way(torch.stack([way(own) for own in grads]).mean(0)).double() - mean).square()
    second = (grads.double().square().mean(0) / len(grads) + mean.square()) / 2
    there = second > 0
    return float(error.sum() / mean.square().sum()), float((error[there] / second[there]).mean())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="folder with tinyshakespeare.txt")
    parser.add_argument("--specs", type=lambda text: text.split(";"), default=SPECS, help=f"(default: {SPECS})")
    parser.add_argument("--ranks", type=options.positive, default=8, help="(default: 8)")
    settings.add_changes(parser)
    options.add_places(parser, "none", ROOT / "build" / "study")


@threads(1)
def run(chosen: argparse.Namespace) -> int:
    """Train, round the gradients of some steps, and write the table."""
    own = settings.settle([TASK], chosen.set)[TASK]
    name = files([TASK], chosen.data, chosen.cache)[TASK]
    job, progress = TASKS[TASK].make(own, 0, chosen.ranks, load(place(chosen.cache, name))), Progress()
    parameters = list(job.model.parameters())
    optimizer = optimizer_of(TASKS[TASK], own, job.model, own.momentum)
    every = ways(chosen.specs, sum(each.numel() for each in parameters))
    found: list[list[tuple[float, float]]] = [[] for _ in every]
    for step in range(1, STEPS[-1] + 1):
        progress(f"step {step} of {STEPS[-1]}", step / STEPS[-1])
        grads = torch.stack([gradient(job, parameters, rank) for rank in range(chosen.ranks)])
        if step in STEPS:
            for own_errors, (_, _, way) in zip(found, every, strict=True):
                own_errors.append(errors(grads, way))
        for parameter, part in zip(parameters, grads.mean(0).split([each.numel() for each in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    progress.end()
    lines = [
        {"way": name, "bits": bits, "errors": [plain for plain, _ in own_errors], "for_adam": [adam for _, adam in own_errors]}
        for own_errors, (name, bits, _) in zip(found, every, strict=True)
    ]
    rows: list[list[str]] = [["", "bits", *(f"step {step}" for step in STEPS), *(f"Adam, {step}" for step in STEPS)]]
    rows += [
        [name, f"{bits:.2f}", *(f"{each[i]:.1e}" for i in (0, 1) for each in own_errors)]
        for own_errors, (name, bits, _) in zip(found, every, strict=True)
    ]
    print(columns(rows))
    report.save(chosen, None, {"settings": {**own._asdict(), "ranks": chosen.ranks, "at": STEPS}, "lines": lines})
    return 0
