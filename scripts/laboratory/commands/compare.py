"""Compare specs on models of several sizes: step times on emulated clusters, and the loss by steps and by seconds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from laboratory import machine, options
from laboratory.compare import plots, steptimes, summary, tables
from laboratory.compare.plan import Plan
from laboratory.refusal import Refused
from laboratory.report import results
from laboratory.study import runs
from laboratory.study.settings import seeds
from laboratory.train import kept

SPARSE = ("topk:ratio=0.001", "gtopk:ratio=0.001", "sketched_sgd:ratio=0.001", "gs_sgd:ratio=0.001")
SMALLER = ("gs_sgd:ratio=0.001,rows=3,candidates=2,compression=125", "gs_sgd:ratio=0.001,rows=3,candidates=1,compression=250")
SPECS = ["dense", *(f"{spec},momentum=0.9" for spec in (*SPARSE, *SMALLER))]

EXAMPLES = """\
examples:
  scripts/lab compare                      # half an hour or more on two cores; needs root for the emulated clusters
  scripts/lab compare --hosts 4 --rate 100mbit --widths 512 --steps 50 --name try
  scripts/lab compare --report --name try  # from the finished launches and runs, also while others are under way

Step times come first, with `none` in each launch; then models are trained with simulated ranks. Each launch and each run is a
file in --cache: the same command continues an interrupted comparison, and `lab study` shares its runs. Delete the folders
compare and study there after a change of the measured code."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    whole, real = options.positive, options.above_0
    parser.add_argument(
        "--hosts", type=options.distinct, default="4,8", help="hosts of each cluster, with one rank each (default: 4,8)"
    )
    parser.add_argument(
        "--rate", type=options.rates, default="1gbit,100mbit", help="rates of the emulated links (default: 1gbit,100mbit)"
    )
    parser.add_argument(
        "--widths", type=options.distinct, default="2048,3520", help="widths of the hidden layers (default: 2048,3520)"
    )
    parser.add_argument("--specs", type=options.specs, default=SPECS, help=f"(default: {';'.join(SPECS)})")
    parser.add_argument("--seeds", type=seeds, default=3, help="two or more (default: 3)")
    parser.add_argument(
        "--steps", type=options.several, default="200,80", help="steps of a training, by width (default: 200,80)"
    )
    parser.add_argument("--lr", type=real, default=0.1, help="learning rate of all trainings (default: 0.1)")
    parser.add_argument("--ranks", type=whole, default=4, help="simulated ranks of a training (default: 4)")
    parser.add_argument("--rounds", type=whole, default=3, help="rounds of a launch (default: 3)")
    parser.add_argument("--turn", type=real, default=2.0, metavar="SECONDS", help="time of a spec in a round (default: 2)")
    parser.add_argument(
        "--memory", type=real, default=17.0, metavar="GB", help="memory for all ranks of a launch (default: 17)"
    )
    parser.add_argument("--jobs", type=whole, default=2, help="trainings at once, one thread each (default: 2)")
    parser.add_argument("--report", action="store_true", help="measure nothing; report what --name has finished")
    options.add_launcher(parser)
    options.add_places(parser, "sketches", machine.ROOT / "build")


def run(chosen: argparse.Namespace) -> int:
    """Measure and train what is missing, and report."""
    plan_path = Path(chosen.cache) / "compare" / "plans" / f"{chosen.name or 'sketches'}.json"
    if chosen.report:
        kept = results.read(plan_path)
        if kept is None:
            raise Refused(f"no comparison is named {plan_path.stem!r} in --cache; begin one without --report")
        return write(chosen, Plan(**kept["plan"]), kept["command"])
    plan = plan_of(chosen)
    results.write(plan_path, {"command": chosen.command, "plan": plan._asdict()})
    print("step times: ", end="", flush=True)
    steptimes.complete(plan, chosen.cache / "compare")
    print("training: ", end="", flush=True)
    every = [run for width in plan.widths for run in plan.runs(width)]
    runs.complete(every, chosen.cache / "study", chosen.jobs, lambda run: run.settings.steps * run.settings.width**2)
    return write(chosen, plan, chosen.command)


def plan_of(chosen: argparse.Namespace) -> Plan:
    """Work out the plan from the options."""
    steps = chosen.steps * len(chosen.widths) if len(chosen.steps) == 1 else chosen.steps
    if len(steps) != len(chosen.widths):
        raise Refused(f"--steps has {len(steps)} numbers, but --widths {len(chosen.widths)}; give one, or one for each width")
    specs = ["dense", *(spec for spec in chosen.specs if spec != "dense")]
    rates = chosen.rate if chosen.launcher == "cluster" else ["loopback"]
    derived = {"rates": rates, "specs": specs, "steps": steps}
    return Plan(**derived, **{name: getattr(chosen, name) for name in Plan._fields if name not in derived})


def write(chosen: argparse.Namespace, plan: Plan, command: str) -> int:
    """Write the tables, pictures and result file of everything finished."""
    commits: set[str] = set()
    models = [_model(plan, width, chosen.cache, commits) for width in plan.widths]
    if not commits:
        print("lab compare: nothing is measured or trained yet", file=sys.stderr)
        return 1
    for model in models:
        print(f"\n{tables.markdown(model, plan.ranks)}\n")
        if model["training"]:
            plots.losses(plan, model, results.path_of(chosen, "sketches", f"-{model['width']}.png"))
    if any(cluster["lines"] for model in models for cluster in model["clusters"]):
        plots.times(models, results.path_of(chosen, "sketches", "-times.png"))
    if len(commits) > 1:
        print(f"lab compare: the figures are of {len(commits)} commits: {', '.join(sorted(commits))}", file=sys.stderr)
    content = {"commits_of_measurements": sorted(commits), "settings": plan._asdict(), "models": models}
    results.save(chosen, results.path_of(chosen, "sketches"), content, command)
    return 0


def _model(plan: Plan, width: int, cache: Path, commits: set[str]) -> dict[str, Any]:
    """Return one model's figures, and add the commits at which they were measured."""
    finished = [kept.load(plan.launches(*cluster, width), cache / "compare") for cluster in plan.clusters()]
    records = runs.records(plan.runs(width), cache / "study")
    commits |= {str(launch["commit"]) for launches in finished for launch in launches} | runs.commits_of(records)
    return summary.model(plan, width, [steptimes.together(launches) for launches in finished], records)
