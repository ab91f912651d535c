"""The summary: for each task and cluster, the seconds until a way's score is nearly dense's, and its score in the end."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradcomp.auto import AGAIN
from laboratory.accuracy.plan import CHOOSING, LAUNCHES, RANKS, TRAININGS, Plan
from laboratory.harness import ways
from laboratory.harness.measured import Training, load
from laboratory.harness.ways import DDP, HOROVOD
from laboratory.refusal import Refused
from laboratory.tasks.table import TASKS

# The part of dense's final score that counts as reached.
NEARLY = 0.99

# The curves of ways that auto names otherwise, and the ways that it may choose, from the one that loses least.
STOCK = {"stock": "stock", "stock in bf16": "bf16", "dense": "stock"}
LOSING = ["stock", "bf16", "half", *(f"orq:levels={levels},momentum=0" for levels in (9, 5)), "topk", "sdagc"]

# A curve: batches, and the score after them, averaged over the seeds.
Curve = list[tuple[int, float]]


def curve(trainings: Sequence[Training], folder: Path) -> Curve | None:
    """Average the scores of the finished trainings, which differ in nothing but the seed."""
    records = [record for own in trainings if (record := load(own, folder)) is not None]
    if not records:
        return None
    scores = [[(batch, score) for batch, _, score in record["scores"]] for record in records]
    return [(points[0][0], statistics.fmean(score for _, score in points)) for points in zip(*scores, strict=True)]


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


class Learning:
    """The curves of one task's trainings, by way. rates: the learning rate of each way, where several were tried."""

    def __init__(self, plan: Plan, task: str, folder: Path):
        self.task = task
        self.curves: dict[str, Curve] = {}
        self.rates: dict[str, float] = {}
        for door, way in plan.trained():
            by_rate: dict[float, list[Training]] = {}
            for seed in range(plan.seeds):
                for own in plan.trainings_of(task, door, way, seed):
                    by_rate.setdefault(own.settings.lr, []).append(own)
            found = {lr: made for lr, each in by_rate.items() if (made := curve(each, folder / TRAININGS)) is not None}
            if found:
                best = (max if TASKS[task].higher_is_better else min)(found, key=lambda lr: found[lr][-1][1])
                self.curves[way], self.rates[way] = found[best], best
        if "stock" not in self.curves:
            raise Refused(f"{task} was not trained with stock DDP yet, which all other ways are compared with")
        self.goal = goal(task, self.curves["stock"])

    def of(self, way: str) -> dict[str, Any]:
        """Return how a way learns: batches to the goal, and the score in the end; nothing if it was not trained."""
        if way not in self.curves:
            return {"batches": None, "score": None}
        return {"batches": batches_to(self.task, self.curves[way], self.goal), "score": self.curves[way][-1][1]}


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


def cell(learning: Learning, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a way's figures on one cluster. auto's choosing is part of its seconds."""
    way, ms = str(line["way"]), float(line["ms"]["median"])
    found: dict[str, Any] = {"way": way, "ms": ms, "over": line["over"]}
    extra = 0.0
    if way in CHOOSING:
        found["chosen"] = line["auto"]["way"]
        extra = line["auto"]["cost_seconds"]  # of one choice
        way = chosen(line["auto"])
    found |= learning.of(way)
    if way in learning.rates and ways.passes(way) > 1:
        found["lr"] = learning.rates[way]
    batches = found["batches"]
    found["seconds"] = None if batches is None else choices(batches) * extra + batches * ms / 1000
    return found


def figures(plan: Plan, task: str, folder: Path) -> dict[str, Any]:
    """Return all figures of a task."""
    learning = Learning(plan, task, folder)
    return {
        "settings": plan.settings(task, RANKS)._asdict(),
        "seeds": plan.seeds,
        "dense": learning.curves["stock"][-1][1],
        "goal": learning.goal,
        "curves": learning.curves,
        "rates": learning.rates,
        "commits": commits(plan, task, folder),
        "clusters": cells(plan, task, learning, folder),
    }


def commits(plan: Plan, task: str, folder: Path) -> list[str]:
    """List the commits of a task's records."""
    found = [load(own, folder / TRAININGS) for own in plan.trainings() if own.task == task]
    found += [load(launch, folder / LAUNCHES) for launch in plan.launches() if launch.task == task]
    return sorted({record["commit"] for record in found if record is not None})


def cells(plan: Plan, task: str, learning: Learning, folder: Path) -> list[dict[str, Any]]:
    """Return the clusters of a task: for each, the lines of both doors."""
    found = []
    for hosts, rate in plan.clusters():
        lines: list[dict[str, Any]] = []
        for door in (DDP, HOROVOD):
            record = load(plan.launch(task, door, hosts, rate), folder / LAUNCHES)
            of_door = {line["way"]: line for line in record["lines"]} if record else {}
            lines += [{"door": door, **cell(learning, line)} for way, line in of_door.items() if way != "none"]
            if of_door:
                lines.append({"door": door, "way": "none", "ms": of_door["none"]["ms"]["median"], "seconds": None})
        if lines:
            found.append({"hosts": hosts, "rate": rate, "lines": lines})
    return found
