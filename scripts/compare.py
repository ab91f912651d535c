#!/usr/bin/env python3
"""Compares algorithms on models of several sizes: step times on emulated clusters, and the loss by steps and by seconds."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from benchlib import machine, options, report, store
from benchlib.ranks import RanksFailed
from comparelib import plots, steptimes, summary, tables
from comparelib.plan import Plan
from studylib import arguments, runs

SPARSE = ("topk:ratio=0.001", "gtopk:ratio=0.001", "sketched_sgd:ratio=0.001", "gs_sgd:ratio=0.001")
SMALLER = ("gs_sgd:ratio=0.001,rows=3,candidates=2,compression=125", "gs_sgd:ratio=0.001,rows=3,candidates=1,compression=250")
SPECS = ["dense", *(f"{spec},momentum=0.9" for spec in (*SPARSE, *SMALLER))]

EXAMPLES = """\
examples:
  scripts/compare.py run                   # half an hour or more on two cores; needs root for the emulated clusters
  scripts/compare.py run --hosts 4 --rate 100mbit --widths 512 --steps 50 --name try
  scripts/compare.py report --name try     # from what is there, also while the rest is still being made

Step times come first, with `none` (no communication) in each launch; then the models are trained with simulated ranks. Each
launch and each run is kept as a file in --cache: the same command continues an interrupted comparison, and study.py has its
runs in common with it. Delete the folders compare and study there after a change of the code that is measured."""


def run(chosen: argparse.Namespace) -> int:
    plan = plan_of(chosen)
    report.write_json(plan_path(chosen), {"command": chosen.written, "plan": plan._asdict()})
    print("step times: ", end="", flush=True)
    steptimes.complete(plan, chosen.cache / "compare")
    print("training: ", end="", flush=True)
    every = [run for width in plan.widths for run in plan.runs(width)]
    runs.complete(every, chosen.cache / "study", chosen.jobs, lambda run: run.settings.steps * run.settings.width**2)
    return write(chosen, plan, chosen.written)


def plan_of(chosen: argparse.Namespace) -> Plan:
    steps = chosen.steps * len(chosen.widths) if len(chosen.steps) == 1 else chosen.steps
    if len(steps) != len(chosen.widths):
        raise ValueError(
            f"--steps has {len(steps)} numbers, but --widths {len(chosen.widths)}; give one, or one for each width"
        )
    specs = ["dense", *(spec for spec in chosen.specs if spec != "dense")]
    rates = chosen.rate if chosen.launcher == "cluster" else ["loopback"]
    worked_out = {"rates": rates, "specs": specs, "steps": steps}
    return Plan(**worked_out, **{name: getattr(chosen, name) for name in Plan._fields if name not in worked_out})


def write_report(chosen: argparse.Namespace) -> int:
    kept = store.load(plan_path(chosen))
    if kept is None:
        raise ValueError(f"there is no comparison {chosen.name!r}; begin one with: compare.py run --name {chosen.name}")
    return write(chosen, Plan(**kept["plan"]), kept["command"])


def plan_path(chosen: argparse.Namespace) -> Path:
    return Path(chosen.cache) / "compare" / "plans" / f"{chosen.name}.json"


def write(chosen: argparse.Namespace, plan: Plan, command: str) -> int:
    """The tables, the result file and the pictures, of all that is there."""
    commits: set[str] = set()
    models = [model_of(plan, width, chosen.cache, commits) for width in plan.widths]
    if not commits:
        print("compare.py: nothing is measured or trained yet", file=sys.stderr)
        return 1
    for model in models:
        print(f"\n{tables.markdown(model, plan.ranks)}\n")
        if model["training"]:
            where = chosen.out / f"compare-{chosen.name}-{model['width']}.png"
            print(f"drawn: {plots.losses(plan, model, where)}")
    if any(cluster["lines"] for model in models for cluster in model["clusters"]):
        print(f"drawn: {plots.times(models, chosen.out / f'compare-{chosen.name}-times.png')}")
    if len(commits) > 1:
        print(f"compare.py: what was measured is of {len(commits)} commits: {', '.join(sorted(commits))}", file=sys.stderr)
    result = {"what": "compare", **machine.origin(command), "commits_of_measurements": sorted(commits)}
    path = chosen.out / f"compare-{chosen.name}.json"
    report.write_json(path, result | {"settings": plan._asdict(), "models": models})
    print(f"written: {path}")
    return 0


def model_of(plan: Plan, width: int, cache: Path, commits: set[str]) -> dict[str, Any]:
    """One model's figures; the commits that they were measured at are added to the others."""
    kept = [steptimes.load(plan.launches(*cluster, width), cache / "compare") for cluster in plan.clusters()]
    records = runs.records(plan.runs(width), cache / "study")
    commits |= {str(launch["commit"]) for launches in kept for launch in launches}
    commits |= {str(record["commit"]) for by_seed in records.values() for record in by_seed.values()}
    return summary.model(plan, width, [steptimes.together(launches) for launches in kept], records)


def several(text: str) -> list[int]:
    """4,8."""
    return [options.positive(part.strip()) for part in text.split(",")]


def distinct(text: str) -> list[int]:
    found = several(text)
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names something twice")
    return found


def above_0(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/compare.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = made.add_subparsers(required=True, metavar="run|report")
    one = kinds.add_parser("run", help="measures and trains what is missing, then the report", allow_abbrev=False)
    one.add_argument("--hosts", type=distinct, default=[4, 8], help="numbers of hosts, one rank each (default 4,8)")
    one.add_argument("--rate", type=options.rates, default=["1gbit", "100mbit"], help="of the links (default 1gbit,100mbit)")
    one.add_argument("--widths", type=distinct, default=[2048, 3520], help="of the model's hidden layers (default 2048,3520)")
    one.add_argument(
        "--specs", type=arguments.specs, default=SPECS, help=f"separated by semicolons (default {';'.join(SPECS)})"
    )
    one.add_argument("--seeds", type=arguments.seeds, default=3, help="two or more (default 3)")
    one.add_argument("--steps", type=several, default=[200, 80], help="of a training, one for each width (default 200,80)")
    one.add_argument("--lr", type=above_0, default=0.1, help="the learning rate of all trainings (default 0.1)")
    one.add_argument("--ranks", type=options.positive, default=4, help="that are simulated in a training (default 4)")
    one.add_argument("--rounds", type=options.positive, default=3, help="of a launch (default 3)")
    one.add_argument(
        "--turn", type=above_0, default=2.0, metavar="SECONDS", help="of a spec in a round, if one step fits (default 2)"
    )
    one.add_argument("--memory", type=above_0, default=17.0, metavar="GB", help="for all ranks of a launch (default 17)")
    one.add_argument("--jobs", type=options.positive, default=2, help="trainings at once, one thread each (default 2)")
    one.add_argument(
        "--launcher", choices=("cluster", "horovodrun"), default="cluster", help="horovodrun: without root, unshaped"
    )
    two = kinds.add_parser("report", help="the report alone, of what is there", allow_abbrev=False)
    for command, do in ((one, run), (two, write_report)):
        arguments.add_places(command, "sketches", machine.ROOT / "build")
        command.set_defaults(do=do)
    return made


def main(given: list[str]) -> int:
    chosen = parser().parse_args(given)
    chosen.written = shlex.join(["scripts/compare.py", *arguments.without_folders(given)])
    try:
        return int(chosen.do(chosen))
    except ValueError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    except RanksFailed as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\ncompare.py: interrupted; the same command continues after what is done", file=sys.stderr)
        sys.exit(130)
