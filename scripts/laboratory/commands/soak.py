"""Train for long on real ranks in trouble, and judge whether everything stays flat and no gradient is lost.

Ranks leave and join, or begin anew; gradients overflow; the loss scale moves; the spec changes.
"""

from __future__ import annotations

import argparse
import time

from laboratory import options, report
from laboratory.loops import soak
from laboratory.loops.launches import launch
from laboratory.options import Refused

EXAMPLES = """\
examples:
  scripts/lab soak --name amd-epyc                           # 20,000 steps over Horovod, then 20,000 over DDP
  scripts/lab soak --network horovod --steps 500 --seed 3    # a minute"""

NETWORKS = ("horovod", "ddp")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--network", choices=(*NETWORKS, "both"), default="both", help="(default: both, one after the other)")
    parser.add_argument("--steps", type=options.positive, default=20_000, help="steps of each network (default: 20000)")
    parser.add_argument("--ranks", type=options.positive, default=4, help="(default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of gradients, specs and trouble (default: 0)")
    options.add_places(parser, "none")


def run(chosen: argparse.Namespace) -> int:
    """Soak each network, judge it, and write the result. Return 1 if a verdict fails."""
    if chosen.ranks < 2:
        raise Refused(f"--ranks {chosen.ranks} must be at least 2: one of them leaves in mid-training")
    plan, words, soaks = soak.Plan(chosen.seed, chosen.steps), {True: "holds", False: "FAILS", None: "not judged"}, {}
    for network in NETWORKS if chosen.network == "both" else [chosen.network]:
        began = time.monotonic()
        reports = launch(
            "soak", chosen.ranks, network, chosen.seed, chosen.steps, seconds=600 + chosen.steps, anew=len(soak.ENDS) - 1
        )
        print(f"{network}: adding up the gradients of all steps", flush=True)
        verdicts = soak.judge(plan, reports)
        print(*(f"  {words[each.holds]:10}  {each.name}: {each.said}" for each in verdicts), sep="\n", flush=True)
        found = [verdict._asdict() for verdict in verdicts]
        soaks[network] = {"verdicts": found, "ranks": chosen.ranks, "seconds": round(time.monotonic() - began)}
    settings = {"steps": chosen.steps, "ranks": chosen.ranks, "seed": chosen.seed, "entries": soak.ENTRIES, "specs": soak.SPECS}
    report.save(chosen, None, {"settings": settings, "networks": soaks})
    return int(any(verdict["holds"] is False for found in soaks.values() for verdict in found["verdicts"]))
