"""Train for long on real ranks in trouble, and judge whether everything stays flat and no gradient is lost.

The ranks are paused, killed, joined and taken away; gradients spike and overflow; the loss scale moves; the spec changes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from laboratory import options
from laboratory.machine import ROOT
from laboratory.refusal import Refused
from laboratory.report import results
from laboratory.report.progress import Progress
from laboratory.soak import picture
from laboratory.soak.driver import Driver
from laboratory.soak.judge import Verdict, judge
from laboratory.soak.networks import NETWORKS, most_ranks
from laboratory.soak.plan import ENTRIES, SPECS, Plan

EXAMPLES = """\
examples:
  scripts/lab soak --name amd-epyc                           # 20,000 steps over Horovod, then 20,000 over DDP
  scripts/lab soak --network ddp --duration 2h --steps 1000000
  scripts/lab soak --network horovod --steps 500 --seed 3    # a few minutes

A soak is over after --steps steps or after --duration, whichever comes first. The ranks' logs stay in --cache."""

UNITS = {"s": 1, "m": 60, "h": 3600}
# Of a log's lines, those that the result and the picture keep.
MOST_POINTS = 400
FIGURES = ("step", "rss_kb", "peak_kb", "fds", "threads", "wall_ms", "cpu_ms", "residual", "scale")


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
    """Soak each network, judge it, and write the result and the picture. Return 1 if a verdict fails."""
    networks = [*NETWORKS] if chosen.network == "both" else [chosen.network]
    if not 2 <= chosen.ranks <= most_ranks():
        raise Refused(f"--ranks {chosen.ranks} must be from 2 to {most_ranks()}: one of them leaves in mid-training")
    soaks, failed = {}, False
    for network in networks:
        soaks[network], verdicts = soak(network, chosen)
        print(f"\n{network}\n" + "\n".join(map(line, verdicts)), flush=True)
        failed |= any(verdict.holds is False for verdict in verdicts)
    settings = {"steps": chosen.steps, "ranks": chosen.ranks, "seed": chosen.seed, "entries": ENTRIES, "specs": SPECS}
    picture.draw(soaks, results.path_of(chosen, None, ".png"))
    results.save(chosen, results.path_of(chosen, None), {"settings": settings, "networks": soaks})
    return 1 if failed else 0


def soak(network: str, chosen: argparse.Namespace) -> tuple[dict[str, Any], list[Verdict]]:
    """Run one network's ranks to the end, and judge them."""
    folder = Path(chosen.cache).resolve() / "-".join(filter(None, (chosen.name, network)))
    with Driver(folder, network, chosen.seed, chosen.steps, chosen.duration) as driver:
        NETWORKS[network](driver, chosen.ranks)
    torch.set_num_threads(1)  # the sums are small, and threads that wait for each other take longer on a busy machine
    progress, steps = Progress(), driver.lines[-1]["step"]
    verdicts = judge(
        Plan(chosen.seed, chosen.steps),
        chosen.ranks,
        driver.lines,
        driver.troubles,
        folder,
        driver.left_over,
        lambda step: progress(f"{network}: adding up the gradients of step {step:,} of {steps:,}", step / (steps + 1)),
    )
    progress.end()
    found = {
        "verdicts": [verdict._asdict() for verdict in verdicts],
        "ranks": chosen.ranks,
        "seconds": round(driver.seconds),
        "troubles": [{key: value for key, value in each.items() if key != "time"} for each in driver.troubles],
        "processes": processes(driver.lines),
    }
    return found, verdicts


def line(verdict: Verdict) -> str:
    """Write a verdict's line."""
    word = {True: "holds", False: "FAILS", None: "not judged"}[verdict.holds]
    return f"  {word:10}  {verdict.name}: {verdict.said}"


def processes(logged: Sequence[Mapping[str, Any]]) -> list[dict[str, list[Any]]]:
    """Gather the figures of every process, by figure, of not too many lines."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for each in logged:
        if "step" in each:
            found.setdefault(each["pid"], []).append(each)
    thinned = [own[:: 1 + len(own) // MOST_POINTS] for own in found.values()]
    return [{key: [_short(each[key]) for each in own] for key in FIGURES} for own in thinned]


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")
