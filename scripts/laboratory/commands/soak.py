"""Train for long on real ranks in trouble, and judge whether everything stays flat and no gradient is lost.

The ranks are paused, killed, joined and taken away; gradients spike and overflow; the loss scale moves; the spec changes.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch

from laboratory import options, ranks
from laboratory.machine import ROOT
from laboratory.refusal import Refused
from laboratory.report import results
from laboratory.soak.driver import HOSTS, NETWORKS, Driver
from laboratory.soak.judge import judge
from laboratory.soak.plan import ENTRIES, SPECS, Plan

EXAMPLES = """\
examples:
  scripts/lab soak --name amd-epyc                           # 20,000 steps over Horovod, then 20,000 over DDP
  scripts/lab soak --network ddp --duration 2h --steps 1000000
  scripts/lab soak --network horovod --steps 500 --seed 3    # a few minutes

A soak is over after --steps steps or after --duration, whichever comes first. The ranks' logs stay in --cache."""

UNITS = {"s": 1, "m": 60, "h": 3600}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--network", choices=(*NETWORKS, "both"), default="both", help="(default: both, one after the other)")
    parser.add_argument("--steps", type=options.positive, default=20_000, help="steps of each network (default: 20000)")
    parser.add_argument(
        "--duration", type=duration, default="24h", help="time of each network, as 90s, 30m or 2h (default: 24h)"
    )
    parser.add_argument("--ranks", type=options.positive, default=4, help="ranks at the start and at the end (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of gradients, specs and trouble (default: 0)")
    options.add_places(parser, "none", ROOT / "build" / "soak")


def duration(text: str) -> float:
    """Read 90s, 30m or 2h, in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write for example 90s, 30m or 2h")
    return float(found[1]) * UNITS[found[2]]


def run(chosen: argparse.Namespace) -> int:
    """Soak each network, judge it, and write the result. Return 1 if a verdict fails."""
    if not 2 <= chosen.ranks <= len(HOSTS):
        raise Refused(f"--ranks {chosen.ranks} must be from 2 to {len(HOSTS)}: one of them leaves in mid-training")
    soaks = {network: soak(network, chosen) for network in ([*NETWORKS] if chosen.network == "both" else [chosen.network])}
    settings = {"steps": chosen.steps, "ranks": chosen.ranks, "seed": chosen.seed, "entries": ENTRIES, "specs": SPECS}
    results.save(chosen, results.path_of(chosen, None), {"settings": settings, "networks": soaks})
    return int(any(verdict["holds"] is False for found in soaks.values() for verdict in found["verdicts"]))


def soak(network: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Run one network's ranks to the end, judge them, and say how."""
    folder = Path(chosen.cache).resolve() / "-".join(filter(None, (chosen.name, network)))
    driver = Driver(folder, network, chosen.seed, chosen.steps, chosen.duration)
    with ranks.termination_interrupts():
        try:
            NETWORKS[network](driver, chosen.ranks)
        finally:
            driver.kill_all()
    torch.set_num_threads(1)  # the sums are small, and threads that wait for each other take longer on a busy machine
    print(f"{network}: adding up the gradients of all steps", flush=True)
    plan = Plan(chosen.seed, chosen.steps)
    verdicts = judge(plan, chosen.ranks, driver.lines, driver.troubles, folder, driver.left_over)
    words = {True: "holds", False: "FAILS", None: "not judged"}
    print(
        "\n".join([f"\n{network}", *(f"  {words[each.holds]:10}  {each.name}: {each.said}" for each in verdicts)]), flush=True
    )
    return {
        "verdicts": [verdict._asdict() for verdict in verdicts],
        "ranks": chosen.ranks,
        "steps": driver.lines[-1]["step"],
        "seconds": round(driver.seconds),
        "troubles": [{key: value for key, value in each.items() if key != "time"} for each in driver.troubles],
    }
