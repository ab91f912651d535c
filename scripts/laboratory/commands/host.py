"""Measure what a step of ResNet-50 costs the host beside its kernels: Python, the binding, and native calls."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from laboratory import machine, options
from laboratory.host import costs
from laboratory.report import results
from laboratory.report.tables import columns

SPECS = "dense;half;topk;sdagc;orq;bingrad"

EXAMPLES = """\
example:
  scripts/lab host

The 161 parameters of ResNet-50 in buckets of the default size, on one thread, with a network that answers at once."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--specs", type=options.specs, default=SPECS, help=f"separated by semicolons (default: {SPECS})")
    parser.add_argument("--ranks", type=options.positive, default=4, help="(default: 4)")
    parser.add_argument("--steps", type=options.positive, default=200, help="that count (default: 200)")
    options.add_places(parser, "the CPU's model")


def run(chosen: argparse.Namespace) -> int:
    """Take the steps, and write the table."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        lines = [costs.of_resnet(spec, chosen.ranks, chosen.steps) for spec in chosen.specs]
    finally:
        torch.set_num_threads(before)
    print(table(lines))
    settings = {"ranks": chosen.ranks, "steps": chosen.steps, "bucket_mb": costs.BUCKET_MB}
    path = results.path_of(chosen, machine.slug(machine.cpu_name()))
    results.save(chosen, path, {"settings": settings, "lines": lines})
    return 0


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Write the table."""
    rows = [["", "buckets", "native calls a bucket", "Python ms", "least", "binding ms", "least", "both, least", "kernels ms"]]
    for line in lines:
        python, binding = line["python_ms"], line["binding_ms"]
        figures = [python["median"], python["low"], binding["median"], binding["low"], python["low"] + binding["low"]]
        row = [line["spec"], str(line["buckets"]), f"{line['calls_a_bucket']:.1f}", *(f"{each:.2f}" for each in figures)]
        rows.append([*row, f"{line['kernels_ms']:.0f}"])
    return columns(rows)
