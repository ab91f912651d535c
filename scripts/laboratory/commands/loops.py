"""Train usual loops by every door, spec and optimizer on two real ranks, and judge that none is worse than plain unsaid."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from laboratory import options, report
from laboratory.harness import ways
from laboratory.loops import by_ray
from laboratory.loops.cases import CASES
from laboratory.loops.cell import FAILED, Key
from laboratory.loops.launches import launch
from laboratory.report import columns

SPECS = "topk;sdagc;orq;auto"
DOORS = ("ddp", "horovod")

# A cell is worse where its score is below plain's mean by more than so many points and so many standard deviations.
POINTS, DEVIATIONS = 2.0, 3.0
# A cell that seems worse trains so many times as long, beside plain.
LONGER = 3
# Seconds of one launch, and the most cells in it.
SECONDS, MOST = 240.0, 8

EXAMPLES = """\
examples:
  scripts/lab loops                                       # all of them, in an hour and a half
  scripts/lab loops --cases base,GAN --doors ddp --specs topk

The exit status is 1 if a cell is worse than plain by more than noise, also after three times the steps, and neither a warning
nor a refusal said so, or if ranks fail."""

Found = dict[Key, dict[str, Any]]
Lines = Sequence[dict[str, Any]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    cases = options.some_of(CASES, ";")
    parser.add_argument("--cases", type=cases, default=[*CASES], help="separated by semicolons (default: all)")
    parser.add_argument("--doors", type=options.some_of(DOORS), default=[*DOORS], help="(default: both)")
    add_trainings(parser, SPECS, 150)
    options.add_places(parser, "none")


def add_trainings(parser: argparse.ArgumentParser, specs: str, steps: int) -> None:
    """Add the options of each cell's trainings."""
    parser.add_argument("--specs", type=lambda text: options.specs(text, check_spec), default=specs, help=f"(default: {specs})")
    parser.add_argument("--steps", type=options.positive, default=steps, help=f"of each training (default: {steps})")
    parser.add_argument("--seeds", type=options.positive, default=3, help="trainings of each cell (default: 3)")


def run(chosen: argparse.Namespace) -> int:
    """Train all cells, and those that seem worse for longer; write the table and the record."""
    every = cells(chosen, [""]) + cells(chosen, chosen.specs, more=True)
    lines = judge(train(seeded(every, chosen.seeds)))
    train_longer(lines, chosen)
    print(columns(table(lines)))
    record = [{**line, "key": list(line["key"][:4])} for line in lines]
    report.save(chosen, None, {"steps": chosen.steps, "ranks": 2, "seeds": chosen.seeds, "cells": record})
    return complain(lines, "worse", "failed")


def complain(lines: Lines, *verdicts: str) -> int:
    """Print the cells with these verdicts. Return 1 if there are some."""
    wrong = [line for line in lines if line["verdict"] in verdicts]
    for line in wrong:
        print(f"{line['verdict']}: {', '.join(line['key'][:4])}: {line['score']} against {line['plain']} {line['refused']}")
    return int(bool(wrong))


def train_longer(lines: Lines, chosen: argparse.Namespace) -> None:
    """Train the cells that are worse for longer, beside plain. Those that are as good in the end are late, not worse."""
    worse = {line["key"]._replace(steps=LONGER * chosen.steps): line for line in lines if line["verdict"] == "worse"}
    again = [*worse, *dict.fromkeys(key._replace(spec="") for key in worse)]
    for longer in judge(train(seeded(again, chosen.seeds))):
        line = worse[longer["key"]]
        line["longer"] = {name: longer[name] for name in ("score", "plain", "noise")} | {"steps": LONGER * chosen.steps}
        if longer["verdict"] == "ok":
            line["verdict"] = "late"


def cells(chosen: argparse.Namespace, specs: Sequence[str], more: bool = False) -> list[Key]:
    """List the cells of these specs. more: and of the case's own."""
    return [
        Key(name, door, kind, spec, 0, chosen.steps)
        for name in chosen.cases
        for door in chosen.doors
        if door in CASES[name].doors
        for kind in CASES[name].kinds
        for spec in [*specs, *(CASES[name].more if more else ())]
    ]


def seeded(keys: Sequence[Key], seeds: int) -> list[Key]:
    """List so many seeds of each cell."""
    return [key._replace(seed=seed) for key in keys for seed in range(seeds)]


def train(keys: Sequence[Key], text: str = "") -> Found:
    """Train cells on two ranks, many in one launch. A refusal ends a launch, and the rest goes into the next.

    text: the prepared file of a task that reads one.
    """
    found: Found = {}
    in_launches = sorted(keys, key=lambda key: (key.door, not key.spec))
    for _, group in groupby(in_launches, key=lambda key: (key.door, not key.spec)):
        left = [*group]
        while left:
            part = left[:MOST]
            try:
                starts = by_ray.launch if part[0].door == "ray" else partial(launch, "play")
                every = starts(2, [list(key) for key in part], text, seconds=SECONDS)
            except AssertionError as failure:
                if len(part) > 1:  # one of them took the ranks down
                    for key in part:
                        found |= train([key], text)
                every = [[{"key": list(part[0]), "score": None, "refused": f"{FAILED}{failure}"[:2000], "warned": []}]] * 2
            for own in zip(*every, strict=False):
                key, cell = Key(*own[0]["key"]), joined(own)
                if key not in found:
                    found[key] = cell
                    print(*key[:5], cell["score"], cell["refused"][:200], sep="  ", file=sys.stderr, flush=True)
            left = [key for key in left if key not in found]
    return found


def joined(own: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the ranks' reports of a cell. The first rank with a refusal has said why."""
    refused = next((each["refused"] for each in own if each["refused"]), "")
    return {**own[0], "refused": refused, "score": None if refused else own[0]["score"]}


def below_noise(score: float, plain: float, noise: float) -> bool:
    """Say whether an accuracy is below plain's by more than noise."""
    return not score >= plain - max(POINTS, DEVIATIONS * noise)


def judge(found: Found, is_worse: Callable[[float, float, float], bool] = below_noise) -> list[dict[str, Any]]:
    """Compare each cell with plain, both by all their seeds. Return a line for each, with ok, worse, warned, refused or failed.

    is_worse: takes the cell's score, plain's, and plain's deviation.
    """
    lines = []
    for key in (key for key in found if key.spec and not key.seed):
        plains = [cell for other, cell in found.items() if not other.spec and other[:3] == key[:3]]
        own = [cell for other, cell in found.items() if other[:4] == key[:4]]
        plain_scores = [cell["score"] for cell in plains if cell["score"] is not None]
        refusals = sorted((cell["refused"] for cell in own if cell["refused"]), key=lambda text: not text.startswith(FAILED))
        known = {text for cell in plains for text in cell["warned"]}
        warned = [text for text in dict.fromkeys(text for cell in own for text in cell["warned"]) if text not in known]
        line: dict[str, Any] = {"key": key, **dict.fromkeys(("score", "plain", "noise"))}
        line |= {"refused": "".join(refusals[:1]), "warned": warned}
        if plain_scores:
            line["plain"], line["noise"] = round(statistics.mean(plain_scores), 3), round(statistics.pstdev(plain_scores), 3)
        if refusals:
            verdict = "failed" if refusals[0].startswith(FAILED) else "refused"
        else:
            is_lost = any(cell["score"] is None for cell in own)
            if plain_scores and not is_lost:
                line["score"] = round(statistics.mean(cell["score"] for cell in own), 3)
                is_lost = is_worse(line["score"], line["plain"], line["noise"])
            verdict = ("warned" if warned else "worse") if is_lost else "ok"
        lines.append({**line, "verdict": verdict})
    return lines


def table(
    lines: Lines,
    heading: Sequence[str] = ("", "plain"),
    form: str = "{:.1f}",
    shown: Callable[[dict[str, Any]], str] | None = None,
) -> list[list[str]]:
    """Write a row for each case, door and optimizer: plain's score, then each spec's. shown: writes that."""
    specs = list(dict.fromkeys(line["key"][3] for line in lines))
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in lines:
        rows.setdefault(tuple(line["key"][:3]), {})[line["key"][3]] = line
    found = [[*heading, *specs]]
    for place, own in rows.items():
        plain = next(iter(own.values()))["plain"]
        cells = [(shown or score_of)(own[spec]) if spec in own else "" for spec in specs]
        found.append([", ".join(place), report.figure(plain, form), *cells])
    return found


def score_of(line: dict[str, Any]) -> str:
    """Write a cell's score, and what is said of it."""
    if line["score"] is None:
        return str(line["verdict"])
    mark = {"worse": " WORSE", "late": " late", "warned": " warned", "ok": " said" if line["warned"] else ""}[line["verdict"]]
    return f"{line['score']:.1f}{mark}"


def check_spec(spec: str) -> None:
    """Refuse a text that is neither a spec nor auto."""
    if not ways.is_spec(spec) and not spec.startswith("auto"):
        raise ValueError(f"{spec!r} is no spec of gradcomp, and not auto")
