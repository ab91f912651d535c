"""Time the steps of a training on real ranks, under each way to exchange gradients."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from laboratory import machine, options
from laboratory.commands.study import prepared_files
from laboratory.machine import ROOT
from laboratory.refusal import Refused
from laboratory.report import results
from laboratory.study import settings
from laboratory.tasks.table import TASKS
from laboratory.train import ways
from laboratory.train.launch import FEWEST, RIVALS, Launch, perform, table

WAYS = "none,sync,stock,fp16,dense,topk:ratio=0.001,sdagc:density=0.001,small=pool"

# The digits' settings for step times.
OF_DIGITS: list[settings.Change] = [(None, "lr", 0.05), (None, "batch", 64), (None, "momentum", 0.0)]

EXAMPLES = f"""\
ways that are no specs of gradcomp:
{chr(10).join(f"  {other.example:16} {other.about} ({', '.join(other.doors)})" for other in ways.OTHERS.values())}

examples:
  scripts/lab train --hosts 4 --rate 1gbit,100mbit --ways none,stock,fp16,dense,topk:ratio=0.001
  scripts/lab train --launcher horovodrun --hosts 2 --set width=256     # without root, links as they are
  scripts/lab train --door ddp --task cifar-large --data FOLDER --ways stock,bf16,auto --rounds 20 --turn 3

Times are medians over rounds in which all ways take turns. Beside each way stand the median of its time over that of
{" and ".join(RIVALS)} in the same round, and the bound that this median stays below with 95 % confidence. `auto` chooses
before the rounds, with those steps that it needs; what it measures later is part of its turns."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--hosts", type=options.positive, default=4, help="emulated hosts, with one rank each (default: 4)")
    parser.add_argument(
        "--rate", type=options.rates, default="1gbit,100mbit", help="rates of the emulated links (default: 1gbit,100mbit)"
    )
    parser.add_argument("--later", type=later, metavar="RATE:SECONDS", help="the rate that all links get after so many seconds")
    parser.add_argument("--ways", type=ways.several, default=WAYS, help="specs of gradcomp, auto, or others, listed below")
    parser.add_argument("--door", choices=ways.DOORS, default=ways.HOROVOD, help="(default: horovod)")
    parser.add_argument("--task", choices=TASKS, default="mlp", help="(default: mlp)")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder with the data of the tasks that need some")
    parser.add_argument("--set", type=settings.changes, action="append", default=[], metavar="NAME=VALUE,...")
    parser.add_argument("--projects", type=Path, metavar="FOLDER", help="folder with checkouts `grace` and `dgc`")
    parser.add_argument("--rounds", type=options.positive, default=3, help="rounds in which each way takes a turn (default: 3)")
    parser.add_argument("--steps", type=options.positive, default=12, help="steps of a turn, at most (default: 12)")
    parser.add_argument("--turn", type=options.above_0, default=1e9, metavar="SECONDS", help="time of a turn, at most")
    options.add_launcher(parser)
    options.add_places(parser, "the CPU's model", ROOT / "build" / "study")


def later(text: str) -> tuple[str, float]:
    """Read 100mbit:60."""
    rate, colon, seconds = text.partition(":")
    if not colon or not re.fullmatch(r"\d+(\.\d+)?", seconds):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate and seconds; write for example 100mbit:60")
    return options.rates(rate)[0], options.above_0(seconds)


def launches(chosen: argparse.Namespace) -> list[Launch]:
    """Return a launch for each rate."""
    try:
        ways.allow(chosen.ways, chosen.door)
    except ValueError as error:
        raise Refused(f"--ways: {error}") from None
    if chosen.launcher != "cluster" and (chosen.later or chosen.door != ways.HOROVOD):
        raise Refused("--later and --door ddp need --launcher cluster")
    if chosen.later and chosen.rounds < FEWEST:
        raise Refused(f"--later needs at least {FEWEST} rounds, to compare those before the change and after it; use --rounds")
    settled = settings.settle([chosen.task], [OF_DIGITS if chosen.task == "mlp" else [], *chosen.set])[chosen.task]
    data = prepared_files([chosen.task], chosen.data, chosen.cache).get(chosen.task, "")
    every = {
        "task": chosen.task,
        "settings": settled,
        "ways": chosen.ways,
        "rounds": chosen.rounds,
        "steps": chosen.steps,
        "turn": chosen.turn,
        "door": chosen.door,
        "later": chosen.later,
        "data": data,
    }
    rates = chosen.rate if chosen.launcher == "cluster" else ["loopback"]
    return [Launch(chosen.launcher, chosen.hosts, rate, **every) for rate in rates]


def run(chosen: argparse.Namespace) -> int:
    """Launch the ranks at each rate, and write the tables."""
    runs = []
    for launch in launches(chosen):
        run = perform(launch, launch.rate, chosen.cache, chosen.projects)
        runs.append({"rate": launch.rate, "later": launch.later, "task": launch.task, "door": launch.door, **run})
        print(f"\n{run['ranks']} ranks, {launch.rate}\n\n{table(run)}\n", flush=True)
    settled = {"launcher": chosen.launcher, "hosts": chosen.hosts, "rounds": chosen.rounds, "steps": chosen.steps}
    path = results.path_of(chosen, machine.slug(machine.cpu_name()))
    results.save(chosen, path, {"settings": settled | launch.settings.key(), "runs": runs})
    return 0
