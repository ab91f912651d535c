"""Train by every way to exchange gradients, time the ways on emulated clusters, and write the page of seconds to accuracy."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradcomp.auto import AGAIN
from laboratory import options, report
from laboratory.harness import measured, ways
from laboratory.harness.measured import Lab, Record, Rounds, Training
from laboratory.harness.ways import DDP, HOROVOD, POWERSGD_FROM
from laboratory.machine import ROOT
from laboratory.options import Refused
from laboratory.report import figure, markdown
from laboratory.tasks import table as tasks
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Settings

PAGE = ROOT / "benchmarks" / "time-to-accuracy.md"
RECORDS = ROOT / "benchmarks" / "results" / "accuracy"

# The tasks that are trained, and the clusters.
TRAINED, HOSTS, LINKS = ("cifar-large", "shakespeare"), (4, 8), ("100mbit", "1gbit", "10gbit", "none")

# The ways of gradcomp, and the two that choose among them.
OWN = ("topk", "sdagc", "blocks")
CHOOSING = ("auto", "auto:loss=high")
# The ways that auto may choose beside those.
CHOSEN = ("half",)

# What a user of each door would have in their place. Older records of Horovod also have `grace` and `dgc`.
ADDED_UP = "bf16:steps=4"
RIVALS = {DDP: ("stock", "bf16", ADDED_UP, "powersgd:rank=1", "powersgd:rank=4"), HOROVOD: ("stock", "fp16")}

# The learning rates that are tried where gradients of several batches are added up, as multiples of the task's.
RATES = (1, 2, 4)

# The ranks of a training, and the batches between two scores.
RANKS, EVERY = 4, 25

# The folders of the records, below that of all.
TRAININGS, LAUNCHES = "courses", "launches"

# A launch: rounds, the steps of a turn, and its seconds.
ROUNDS, STEPS, TURN = 5, 8, 1.2

# The part of dense's final score that counts as reached.
NEARLY = 0.99

# The curves of ways that auto names otherwise, and the ways that it may choose, or could once, from the one that loses least.
STOCK = {"stock": "stock", "stock in bf16": "bf16", "dense": "stock"}
LOSING = ["stock", "bf16", "half", "blocks", *(f"orq:levels={levels},momentum=0" for levels in (9, 5)), "topk", "sdagc"]

# A curve: batches, and the score after them.
Curve = list[tuple[int, float]]

DOORS = {"ddp": "DDP", "horovod": "Horovod"}
NEVER, UNTRAINED = "never", "-"
UNITS = {"kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}

INTRODUCTION = f"""\
# Time to accuracy

Tables beside [the results](../docs/results.md#time-to-a-loss), which have three seeds, made by `scripts/lab accuracy`: how long
a training takes until its score is within {100 - 100 * NEARLY:.0f} % of dense's final one.

- **Scores** come from whole trainings on {RANKS} real ranks of one machine, with the score of held-out data after every
  {EVERY} batches, one seed, whose final score varies by as much as that 1 %: only large differences count. Where a way never
  gets there, its final score stands in brackets.
- **Seconds** are batches times the seconds of a batch, which are measured on emulated clusters with links of the given rate,
  where all ways take turns; the first to get there is bold. All hosts share one machine of two cores. A cluster of 8 hosts
  trains with the same batch in all, half as large on each; its scores are those of {RANKS} ranks.
- `{ADDED_UP}` adds up the gradients of four batches before it exchanges them in bf16, with the best of three learning
  rates: dense's, and {" and ".join(f"{rate} times" for rate in RATES[1:])} that. PowerSGD is torch's hook:
  {POWERSGD_FROM} steps go by before it compresses, in one bucket, since gloo mixes up several. `grace` and `dgc` are GRACE's
  Top-k and Deep Gradient Compression, their authors' code called from our hooks. Other settings are advised: PowerSGD after a
  tenth of the steps, by torch, and DGC with a warm-up of ratios under SGD, by its authors.
- `auto` counts with what choosing cost. Its scores are those of the way that it chose. It was measured before `blocks`, with
  nine and five levels [in its place](../docs/decisions/auto.md#five-bits-and-no-levels)."""

EXAMPLES = """\
examples:
  scripts/lab accuracy --data FOLDER    # five hours of two cores; needs root for the emulated clusters
  scripts/lab accuracy --data FOLDER --report    # from what is finished, also while the rest is under way

Each training and each launch is a file in --records: the same command continues where it stopped. Times need the whole machine;
--only does one of both parts."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="folder with the data of the tasks")
    parser.add_argument("--only", choices=("trainings", "times"), help="make only these, and no page")
    parser.add_argument("--report", action="store_true", help="make the page of what is finished")
    parser.add_argument("--page", type=Path, default=PAGE, help="(default: benchmarks/time-to-accuracy.md)")
    parser.add_argument(
        "--records", type=Path, default=RECORDS, metavar="FOLDER", help="finished parts (default: benchmarks/results/accuracy)"
    )
    options.add_places(parser, "the page", ROOT / "build" / "study")


def run(chosen: argparse.Namespace) -> int:
    """Train and measure what is missing, and write the page and all figures."""
    if not chosen.report:
        data, lab = tasks.files(TRAINED, chosen.data, chosen.cache), Lab(chosen.command, chosen.cache)
        if chosen.only != "times":
            measured.complete([own for task in TRAINED for own in trainings(task, data[task])], chosen.records / TRAININGS, lab)
        if chosen.only != "trainings":
            measured.complete([own for task in TRAINED for own in launches(task, data[task])], chosen.records / LAUNCHES, lab)
        if chosen.only:
            return 0
    found = {task: figures(task, chosen.records) for task in TRAINED}
    chosen.page.write_text(page(found, os.path.relpath(report.path_of(chosen, None), chosen.page.parent)))
    print(f"written: {chosen.page}")
    scores = {task: TASKS[task].score_name for task in TRAINED}
    report.save(chosen, None, {"hosts": HOSTS, "rates": LINKS, "scores": scores, "tasks": found})
    return 0


def settings(task: str, ranks: int, rate: float = 1.0) -> Settings:
    """Return a task's settings. All ranks together have the same batch, however many they are.

    Nothing is clipped: the ways would clip different things.
    """
    own = TASKS[task].defaults
    return own._replace(clip=0.0, batch=own.batch * RANKS // ranks, lr=own.lr * rate)


def trainings(task: str, data: str = "") -> list[Training]:
    """List the trainings of a task, one for each learning rate that is tried. A way of both doors learns alike by both."""
    ours = [(DDP, way) for way in (*RIVALS[DDP], *OWN, *CHOSEN)]
    return [
        Training(task, way, 0, RANKS, settings(task, RANKS, rate), door, EVERY, data)
        for door, way in [*ours, *((HOROVOD, way) for way in RIVALS[HOROVOD] if way not in RIVALS[DDP])]
        for rate in (RATES if way == ADDED_UP else (1,))
    ]


def launches(task: str, data: str = "") -> list[Rounds]:
    """List the launches of a task, each of which times all ways of a door on one cluster."""
    return [
        Rounds("cluster", *cluster, task, settings(task, cluster[0]), each, ROUNDS, STEPS, TURN, door, data=data)
        for door, others in RIVALS.items()
        for each in [["none", *others, *OWN, *CHOOSING]]
        for cluster in itertools.product(HOSTS, LINKS)
    ]


def launched(folder: Path, task: str, door: str) -> dict[tuple[int, str], Record]:
    """Read the newest launch of a task and door on each cluster."""
    every = [each for each in measured.records(folder / LAUNCHES) if (each["key"]["task"], each["key"]["door"]) == (task, door)]
    return {(each["key"]["hosts"], each["key"]["rate"]): each for each in sorted(every, key=lambda each: each.get("date", ""))}


def figures(task: str, folder: Path) -> dict[str, Any]:
    """Return all figures of a task: how each way learns, and for each cluster the lines of both doors."""
    learnt, commits = curves(task, folder)
    if "stock" not in learnt:
        raise Refused(f"{task} was not trained with stock DDP yet, which all other ways are compared with")
    wanted = goal(task, learnt["stock"][1])
    clusters: list[dict[str, Any]] = []
    by_door = {door: launched(folder, task, door) for door in (DDP, HOROVOD)}
    for hosts, rate in itertools.product(HOSTS, LINKS):
        lines: list[dict[str, Any]] = []
        for door, every in by_door.items():
            record = every.get((hosts, rate), {"lines": []})
            commits |= {record["commit"]} if record["lines"] else set()
            of_door = {line["way"]: line for line in record["lines"]}
            none = of_door.pop("none", None)
            lines += [{"door": door, **cell(task, line, learnt, wanted)} for line in of_door.values()]
            if none:
                lines.append({"door": door, "way": "none", "ms": none["ms"]["median"], "seconds": None})
        if lines:
            clusters.append({"hosts": hosts, "rate": rate, "lines": lines})
    return {
        "settings": settings(task, RANKS)._asdict(),
        "seeds": 1,
        "dense": learnt["stock"][1][-1][1],
        "goal": wanted,
        "curves": {way: curve for way, (_, curve) in learnt.items()},
        "rates": {way: rate for way, (rate, _) in learnt.items()},
        "commits": sorted(commits),
        "clusters": clusters,
    }


def cell(task: str, line: Mapping[str, Any], learnt: Mapping[str, tuple[float, Curve]], wanted: float) -> dict[str, Any]:
    """Return a way's figures on one cluster. auto's choosing is part of its seconds."""
    way, ms = str(line["way"]), float(line["ms"]["median"])
    found: dict[str, Any] = {"way": way, "ms": ms, "over": line["over"]}
    extra = 0.0
    if way in CHOOSING:
        found["chosen"] = line["auto"]["way"]
        extra = line["auto"]["cost_seconds"]  # of one choice
        way = chosen(line["auto"])
    if way not in learnt:
        return found | {"batches": None, "score": None, "seconds": None}
    rate, curve = learnt[way]
    batches = batches_to(task, curve, wanted)
    found |= {"batches": batches, "score": curve[-1][1]}
    if ways.passes(way) > 1:
        found["lr"] = rate
    return found | {"seconds": None if batches is None else choices(batches) * extra + batches * ms / 1000}


def curves(task: str, folder: Path) -> tuple[dict[str, tuple[float, Curve]], set[str]]:
    """Read the learning rate and the curve of each way that was trained, of several rates those with the best end.

    Return the commits of the trainings, too.
    """
    best = max if TASKS[task].higher_is_better else min
    found: dict[str, tuple[float, Curve]] = {}
    commits = set()
    for record in measured.records(folder / TRAININGS):
        key = record["key"]
        if key["task"] == task and not key.get("rate"):
            own = key["settings"]["lr"], [(int(batch), float(score)) for batch, _, score in record["scores"]]
            found[key["way"]] = best(found.get(key["way"], own), own, key=lambda made: made[1][-1][1])
            commits.add(record["commit"])
    return found, commits


def goal(task: str, dense: Curve) -> float:
    """Return the score that counts as reached."""
    final = dense[-1][1]
    return final * NEARLY if TASKS[task].higher_is_better else final / NEARLY


def batches_to(task: str, found: Curve, wanted: float) -> float | None:
    """Return the batches after which a curve reaches a score, on a line between two scores. None if it never does."""
    sign = 1 if TASKS[task].higher_is_better else -1
    before, was = 0, None
    for batch, score in found:
        if sign * score >= sign * wanted:
            if was is None or score == was:
                return float(batch)
            return before + (batch - before) * (wanted - was) / (score - was)
        before, was = batch, score
    return None


def chosen(auto: Mapping[str, Any]) -> str:
    """Return the way of the curve that stands for auto's choice: of several, the one that loses most.

    A way between hosts learns like the same one between ranks.
    """
    way = str(auto["way"])
    specs = [re.sub(r" in \d+ layers$", "", part) for part in way.split("; ")]
    parts = [re.sub(r"by_host=true(,|$)", "", spec).rstrip(":,") for spec in specs]
    return max((STOCK.get(part, part) for part in parts), key=LOSING.index)


def choices(batches: float) -> int:
    """Return how often auto chooses in so many batches: again after AGAIN, and then after twice as many each time."""
    return 1 + int(math.log2(batches / AGAIN + 1))


def cluster(hosts: int, rate: str) -> str:
    """Name a cluster."""
    found = re.fullmatch(r"([0-9.]+)([a-z]+)", rate)
    return f"{hosts} hosts, " + (f"{found[1]} {UNITS.get(found[2], found[2])}" if found else "unshaped")


def name(line: Mapping[str, Any]) -> str:
    """Name a way and its door."""
    rate = f", lr {line['lr']:g}" if "lr" in line else ""
    return f"`{line['way']}`{rate}, {DOORS[line['door']]}"


def best(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the line that reaches the goal first."""
    reached = [line for line in lines if line["seconds"] is not None]
    return min(reached, key=lambda line: float(line["seconds"]), default=None)


def table(every: Sequence[Mapping[str, Any]], score: str) -> str:
    """Write a task's table. The best of each cluster is bold."""
    ways = {(line["door"], line["way"]): line for cells in every for line in cells["lines"] if line["way"] != "none"}
    rows = [["way", score, *(cluster(cells["hosts"], cells["rate"]) for cells in every)]]
    for key in sorted(ways, key=lambda key: key[0] != DDP):
        lines = [next((line for line in cells["lines"] if (line["door"], line["way"]) == key), None) for cells in every]
        final = ways[key]["score"] if ways[key]["way"] not in CHOOSING else None
        seconds = [_seconds(line, best(cells["lines"])) for line, cells in zip(lines, every, strict=True)]
        rows.append([name(ways[key]), figure(final, "{:.2f}", ""), *seconds])
    return markdown(rows)


def _seconds(line: Mapping[str, Any] | None, first: Mapping[str, Any] | None) -> str:
    if line is None or line["score"] is None:
        return UNTRAINED
    if line["seconds"] is None:
        which = f"{line['chosen']}, " if "chosen" in line else ""
        return f"{NEVER} ({which}{line['score']:.2f})"
    text = f"{line['seconds']:.0f} s"
    text = f"**{text}**" if first is line else text
    return f"{text} ({line['chosen']})" if "chosen" in line else text


def page(tasks: Mapping[str, Mapping[str, Any]], result: str) -> str:
    """Write the page. result: the file with all figures."""
    parts = [INTRODUCTION]
    for task, found in tasks.items():
        settings, about = found["settings"], TASKS[task].about
        trained = f"{settings['steps']} steps of {RANKS} x {settings['batch']}, {TASKS[task].optimizer}, one seed"
        what = f"dense ends at {found['dense']:.2f} ({TASKS[task].score_name}), and {found['goal']:.2f} counts as reached"
        parts.append(f"## {task}\n\n{about[0].upper()}{about[1:]}; {trained}; {what}.")
        clusters = [cells for cells in found["clusters"] if cells["hosts"] in HOSTS]  # an older record has more
        parts.append(table(clusters, TASKS[task].score_name))
    commits = sorted({commit for found in tasks.values() for commit in found["commits"]})
    parts.append(f"All figures: [{result.rpartition('/')[2]}]({result}). Commits: {', '.join(commits)}.")
    return "\n\n".join(parts) + "\n"
