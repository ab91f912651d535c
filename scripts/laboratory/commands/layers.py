"""Time steps of a model of many tiny layers on two real ranks: what a layer costs beside the door's own cost."""

from __future__ import annotations

import argparse
from typing import Any

from laboratory import machine, options, ranks
from laboratory.report import results
from laboratory.report.tables import columns
from laboratory.timing import Spread

SPECS = "topk;sdagc;orq"
RANKS, DOORS = 2, {"compression": "horovodrun", "optimizer": "horovodrun", "ddp": "torchrun"}

EXAMPLES = """\
example:
  scripts/lab layers --layers 2000

The doors: compression in stock hvd.DistributedOptimizer, gradcomp.horovod.DistributedOptimizer, and ddp. In a round, the door
alone and every spec take turns; a ratio is taken within a round."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--layers", type=options.positive, default=2000, help="(default: 2000)")
    parser.add_argument("--entries", type=options.positive, default=3, help="of a layer (default: 3)")
    parser.add_argument("--specs", default=SPECS, help=f"separated by semicolons (default: {SPECS})")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help="(default: sgd, with momentum and decay)")
    parser.add_argument("--rounds", type=options.positive, default=7, help="(default: 7)")
    parser.add_argument("--steps", type=options.positive, default=5, help="steps of a turn (default: 5)")
    options.add_places(parser, "the CPU's model")


def run(chosen: argparse.Namespace) -> int:
    """Time every door, and write the table."""
    specs = [spec.strip() for spec in chosen.specs.split(";") if spec.strip()]
    given = [f"--{name}={getattr(chosen, name)}" for name in ("layers", "entries", "optimizer", "rounds", "steps")]
    doors: dict[str, Any] = {}
    for door, launcher in DOORS.items():
        words = ranks.command(launcher, RANKS, ["laboratory.layers.job", f"--door={door}", *given, *specs])
        doors[door] = summary(ranks.run(words, ranks.environment(RANKS), door))
    print(table(doors))
    settings = {name: getattr(chosen, name) for name in ("layers", "entries", "optimizer", "rounds", "steps")}
    content = {"settings": settings | {"ranks": RANKS}, "doors": doors}
    results.save(chosen, results.path_of(chosen, machine.slug(machine.cpu_name())), content)
    return 0


def summary(raw: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return each spec's milliseconds, and its times over those of the door alone, within rounds."""
    alone = raw[""]
    found: dict[str, Any] = {}
    for spec, rounds in raw.items():
        ms = {kind: Spread.of([1e3 * each[kind] for each in rounds])._asdict() for kind in ("wall", "processor")}
        pairs = list(zip(rounds, alone, strict=True))
        ratios = {kind: Spread.of([own[kind] / door[kind] for own, door in pairs])._asdict() for kind in ms}
        found[spec or "alone"] = {"ms": ms, "ratio": ratios}
    return found


def table(doors: dict[str, Any]) -> str:
    """Write the table."""
    rows: list[tuple[str, ...]] = [("door", "spec", "ms a step", "x alone", "of rounds", "processor, x alone")]
    for door, lines in doors.items():
        for spec, line in lines.items():
            wall, processor = line["ratio"]["wall"], line["ratio"]["processor"]
            spread = f"{wall['low']:.2f}..{wall['high']:.2f}"
            ms = f"{line['ms']['wall']['median']:.0f}"
            rows.append((door, spec, ms, f"{wall['median']:.2f}", spread, f"{processor['median']:.2f}"))
    return columns(rows)
