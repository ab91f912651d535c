"""Measure lgc on the net with residual blocks: bytes and seconds of its phases, and the redundancy between ranks."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from gradcomp.compressors.lgc.common_places import PlaceSelection
from gradcomp.core.requests import World
from laboratory import options
from laboratory.lgc import phases, redundancy
from laboratory.refusal import Refused
from laboratory.report import results
from laboratory.report.progress import Progress
from laboratory.report.tables import columns

# A compressor, and knobs beside those of its phases.
CONFIGURATIONS = (
    ("topk", ""),
    ("lgc", ""),
    ("lgc", "instance=server"),
    ("lgc", "leader=rotate"),
    ("lgc", "instance=server,leader=rotate"),
    ("lgc", "code=single"),
    ("lgc", "places=plain"),
    ("lgc", "bands=1"),
    ("lgc", "decoder=leaky"),
)

# The number of entries of two models.
MODELS = {"this net": 171_000, "ResNet-50": 25_557_032}

EXAMPLES = """\
examples:
  scripts/lab lgc                            # a quarter of an hour on one core
  scripts/lab lgc --learn 50 --steps 100     # a first look"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--ratio", type=options.above_0, default=0.01, help="share of entries sent (default: 0.01)")
    parser.add_argument("--learn", type=options.positive, default=300, help="steps of learning (default: 300)")
    parser.add_argument(
        "--steps", type=options.positive, default=600, help="steps in which redundancy is measured (default: 600)"
    )
    parser.add_argument("--ranks", type=options.positive, default=4, help="simulated ranks (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    options.add_places(parser, "none")


def run(chosen: argparse.Namespace) -> int:
    """Train under every configuration, and write tables, picture and result file."""
    if chosen.ranks < 2:
        raise Refused(f"--ranks {chosen.ranks} must be at least 2: redundancy is measured between ranks")
    if chosen.steps <= redundancy.DENSE + 10:
        raise Refused(f"--steps {chosen.steps} must be above {redundancy.DENSE + 10}: the first {redundancy.DENSE} are dense")
    torch.set_num_threads(1)
    progress = Progress()
    rows: list[dict[str, Any]] = []
    for name, knobs in CONFIGURATIONS:
        rows += phases.measure(name, knobs, chosen.ratio, chosen.learn, chosen.seed, chosen.ranks, progress)
    found = redundancy.measure(chosen.ratio, chosen.steps, chosen.seed, chosen.ranks, progress)
    progress.end()
    print(columns(phases.table(rows, rows[0])))
    print(f"\n{columns(rows_of_places(chosen.ranks))}\n")
    means = redundancy.summary(found)
    figures = [[title, f"{means[name]:.3f}"] for name, title in redundancy.CURVES.items()]
    print(columns([["in the last third of the steps", ""], *figures]))
    title = f"{chosen.ranks} ranks, one entry in {1 / chosen.ratio:g}: redundancy (left), errors of codes (right)"
    redundancy.draw(found, title, results.path_of(chosen, None, "-redundancy.png"))
    curves = {name: [round(value, 4) for value in curve] for name, curve in found.items()}
    content = {"ranks": chosen.ranks, "phases": rows, "redundancy": {"means": means, "curves": curves}}
    results.save(chosen, results.path_of(chosen, None), content)
    return 0


def rows_of_places(ranks: int) -> list[list[str]]:
    """Make the rows of the table of bits."""
    rows = [["bits of a place", "ratio", "plain", "bands=1", "bands=16"]]
    for name, n in MODELS.items():
        for ratio in (0.01, 0.001):
            bits = [f"{bits_of_places(n, ratio, bands, ranks):.1f}" for bands in (1, 16)]
            rows.append([name, f"{ratio:g}", "32", *bits])
    return rows


def bits_of_places(n: int, ratio: float, bands: int, ranks: int) -> float:
    """Return the bits of one place where every rank leads a part."""
    selection = PlaceSelection(n, World(0, ranks), 0, ratio=ratio, leader="parts", bands=bands, packed=True, seed=0)
    return 8 * next(field.length for field in selection.form() if field.name == "places") / selection.k
