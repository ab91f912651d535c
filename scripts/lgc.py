#!/usr/bin/env python3
"""Measures lgc on the net with residual blocks: bytes and seconds of its phases, and what ranks' gradients have in common."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from benchlib import machine, options, report
from lgclib import phases, redundancy
from studylib import arguments

from gradcomp.compressors.lgc.common_places import Leading
from gradcomp.requests import World

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
EXAMPLES = """\
examples:
  scripts/lgc.py                            # all of it, a quarter of an hour on one core
  scripts/lgc.py --learn 50 --steps 100     # a first look"""

MODELS = {"this net": 171_000, "ResNet-50": 25_557_032}


def bits_of_places(n: int, ratio: float, bands: int, ranks: int) -> float:
    """A place's, where every rank leads a part."""
    leading = Leading(n, ratio, "parts", bands, packed=True, seed=0, world=World(0, ranks), step=0)
    return 8 * next(field.length for field in leading.form() if field.name == "places") / leading.k


def table_of_places(ranks: int) -> list[list[str]]:
    rows = [["bits of a place", "ratio", "plain", "bands=1", "bands=16"]]
    for name, n in MODELS.items():
        for ratio in (0.01, 0.001):
            bits = [f"{bits_of_places(n, ratio, bands, ranks):.1f}" for bands in (1, 16)]
            rows.append([name, f"{ratio:g}", "32", *bits])
    return rows


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/lgc.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ratio", type=float, default=0.01, help="of the entries that travel (default 0.01)")
    parser.add_argument("--learn", type=options.positive, default=300, help="steps of learning (default 300)")
    parser.add_argument("--steps", type=options.positive, default=600, help="in which redundancy is looked at (default 600)")
    parser.add_argument("--ranks", type=options.positive, default=4, help="that are simulated (default 4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", type=arguments.name, default="lgc", help="of the results (default lgc)")
    parser.add_argument(
        "--out", type=Path, default=machine.ROOT / "benchmarks" / "results", help="(default benchmarks/results)"
    )
    chosen = parser.parse_args(given)
    if chosen.ranks < 2:
        parser.error("--ranks must be 2 or more: one has nothing in common with others")
    if chosen.steps <= redundancy.DENSE + 10:
        parser.error(f"--steps must be above {redundancy.DENSE + 10}: the first {redundancy.DENSE} are dense")
    torch.set_num_threads(1)
    tell = report.Progress()
    rows: list[dict[str, Any]] = []
    for name, knobs in CONFIGURATIONS:
        rows += phases.measure(name, knobs, chosen.ratio, chosen.learn, chosen.seed, chosen.ranks, tell)
    found = redundancy.measure(chosen.ratio, chosen.steps, chosen.seed, chosen.ranks, tell)
    tell.end()
    print(report.table(phases.table(rows, rows[0])))
    print(f"\n{report.table(table_of_places(chosen.ranks))}\n")
    means = redundancy.summary(found)
    figures = [[what, f"{means[name]:.3f}"] for name, what in redundancy.CURVES.items()]
    print(report.table([["in the last third of the steps", ""], *figures]))
    said = f"{chosen.ranks} ranks, one entry in {1 / chosen.ratio:g}: what they have in common (left), what codes miss (right)"
    drawn = redundancy.draw(found, said, chosen.out / f"{chosen.name}-redundancy.png")
    result = {
        "what": "lgc",
        **machine.origin(shlex.join(["scripts/lgc.py", *arguments.without_folders(given)])),
        "ranks": chosen.ranks,
        "phases": rows,
        "redundancy": {"means": means, "curves": {name: [round(x, 4) for x in curve] for name, curve in found.items()}},
    }
    path = chosen.out / f"{chosen.name}.json"
    report.write_json(path, result)
    print(f"\ndrawn: {drawn}\nwritten: {path}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\nlgc.py: interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)
