"""Time the steps of a training on real ranks, under each way to exchange gradients."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from laboratory import machine, options, report
from laboratory.harness import measured, rounds, settings, ways
from laboratory.harness.measured import Lab, Rounds
from laboratory.machine import ROOT
from laboratory.options import Refused
from laboratory.tasks.table import TASKS, files

WAYS = "none,stock,fp16,dense,topk:ratio=0.001,sdagc:density=0.001,small=pool"

# The digits' settings for step times.
OF_DIGITS: list[settings.Change] = [(None, "lr", 0.05), (None, "batch", 64), (None, "momentum", 0.0)]

EXAMPLES = f"""\
ways that are no specs of gradcomp:
{chr(10).join(f"  {other.example:16} {other.about} ({', '.join(other.doors)})" for other in ways.OTHERS.values())}
  local:30/0.9/0.7/sign  local steps: every, outer rate and momentum, spec (ddp); steps should be a multiple of every

examples:
  scripts/lab train --hosts 4 --rate 1gbit,100mbit --ways none,stock,fp16,dense,topk:ratio=0.001
  scripts/lab train --launcher local --hosts 2 --set width=256     # without root, links as they are
  scripts/lab train --door ddp --task cifar-large --data FOLDER --ways stock,bf16,auto --rounds 20 --turn 3
  scripts/lab train --door fsdp --ways none,stock,bf16,blocks      # shards on all ranks; hsdp: replicas of two shards

Times are medians over rounds in which all ways take turns. Beside each way stand the median of its time over that of
{", ".join(rounds.RIVALS)} in the same round, and the bound that this median stays below with 95 % confidence. `auto` chooses
before the rounds, with those steps that it needs; what it measures later is part of its turns."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--hosts", type=options.positive, default=4, help="emulated hosts, with one rank each (default: 4)")
    rates = partial(options.listed, read=options.rate)
    parser.add_argument("--rate", type=rates, default="1gbit,100mbit", help="of the emulated links (default: 1gbit,100mbit)")
    parser.add_argument(
        "--later", type=options.later, metavar="RATE:SECONDS", help="the rate that all links get after so many seconds"
    )
    parser.add_argument("--ways", type=ways.several, default=WAYS, help="specs of gradcomp, auto, or others, listed below")
    parser.add_argument("--door", choices=ways.TIMED, default=ways.HOROVOD, help="(default: horovod)")
    parser.add_argument("--task", choices=TASKS, default="mlp", help="(default: mlp)")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder with the data of the tasks that need some")
    settings.add_changes(parser)
    parser.add_argument("--rounds", type=options.positive, default=3, help="rounds in which each way takes a turn (default: 3)")
    parser.add_argument("--steps", type=options.positive, default=12, help="steps of a turn, at most (default: 12)")
    parser.add_argument("--turn", type=options.above_0, default=1e9, metavar="SECONDS", help="time of a turn, at most")
    parser.add_argument(
        "--launcher",
        choices=("cluster", "local"),
        default="cluster",
        help="cluster: emulated hosts, needs root (default); local: ranks on this machine alone, links as they are",
    )
    options.add_places(parser, "the CPU's model", ROOT / "build" / "study")


def launches(chosen: argparse.Namespace) -> list[Rounds]:
    """Return the rounds of each rate."""
    ways.refuse(chosen.ways, chosen.door)
    if (shards := ways.SHARDS.get(chosen.door, 0)) and chosen.hosts % shards:
        raise Refused(f"--door {chosen.door} shards a model on {shards} hosts; let --hosts be a multiple, not {chosen.hosts}")
    if chosen.launcher == "local" and chosen.later:
        raise Refused("--later changes the links of --launcher cluster; leave one of them out")
    if chosen.later and chosen.rounds < rounds.FEWEST:
        needed = f"at least {rounds.FEWEST} rounds, to compare those before the change and after it"
        raise Refused(f"--later needs {needed}; use --rounds")
    settled = settings.settle([chosen.task], [OF_DIGITS if chosen.task == "mlp" else [], *chosen.set])[chosen.task]
    if settled.clip:
        raise Refused(f"{chosen.task} clips gradients, which the ways would do differently; add --set clip=0")
    data = files([chosen.task], chosen.data, chosen.cache)[chosen.task]
    every = {name: getattr(chosen, name) for name in ("task", "ways", "rounds", "steps", "turn", "door", "later")}
    launcher = "cluster" if chosen.launcher == "cluster" else measured.LAUNCHERS[chosen.door]
    rates = chosen.rate if launcher == "cluster" else ["loopback"]
    return [Rounds(launcher, chosen.hosts, rate, settings=settled, data=data, **every) for rate in rates]


def run(chosen: argparse.Namespace) -> int:
    """Launch the ranks at each rate, and write the tables."""
    runs = []
    every = launches(chosen)
    for each in every:
        found = measured.perform(each, Lab(chosen.command, chosen.cache))
        runs.append({**each.key(), **found})
        print(f"\n{found['ranks']} ranks, {each.rate}\n\n{rounds.table(found)}\n", flush=True)
    settled = {"launcher": chosen.launcher, "hosts": chosen.hosts, "rounds": chosen.rounds, "steps": chosen.steps}
    report.save(chosen, machine.slug(machine.cpu_name()), {"settings": settled | every[0].settings.key(), "runs": runs})
    return 0
