"""The tables of docs/local-steps.md, from the records of `scripts/lab study`.

PYTHONPATH=scripts python -m documentation.local_steps    writes them anew
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from laboratory.harness.ways import local_of
from laboratory.machine import ROOT
from laboratory.report import filled, read

PAGE = ROOT / "docs" / "local-steps.md"


def lines(name: str) -> list[dict[str, Any]]:
    """Return a study's lines, DDP's first."""
    (task,) = read(ROOT / "benchmarks" / "results" / f"study-local-{name}.json")["tasks"].values()
    found: list[dict[str, Any]] = task["lines"]
    return found


def nats(line: dict[str, Any]) -> float:
    """Return the loss of a held-out byte, over the seeds."""
    return statistics.fmean(math.log(score) for score in line["scores"])


def over(line: dict[str, Any], dense: dict[str, Any]) -> float:
    """Return how much larger a loss is than DDP's with the same seeds, in percent."""
    same = {**dense, "scores": [dense["scores"][dense["seeds"].index(seed)] for seed in line["seeds"]]}
    return 100 * (nats(line) / nats(same) - 1)


def trained() -> list[dict[str, Any]]:
    """Return the lines after 3,000 steps, DDP's first: a way with one seed alone is in the record of the first seed."""
    several = lines("steps")
    known = [line["spec"] for line in several]
    return several + [line for line in lines("first-seed") if line["spec"] not in known]


def losses() -> list[list[str]]:
    """Write a row for each way: its loss, how much larger it is than DDP's, and its bytes."""
    ddp, *others = trained()
    rows = [["way", "nats a byte", "over DDP's", "bytes, DDP's / sent", "seeds"]]
    rows.append(["DDP", f"{nats(ddp):.3f}", "", "1 x", str(len(ddp["seeds"]))])
    for line in others:
        way = local_of(line["spec"])
        assert way is not None
        written = f"`every={way.every}`, `{way.spec}`"
        ratio = f"{line['compression']:,.0f} x"
        rows.append([written, f"{nats(line):.3f}", f"{over(line, ddp):+.1f} %", ratio, str(len(line["seeds"]))])
    return rows


def outer() -> list[list[str]]:
    """Write a row for each outer step, by rate and momentum."""
    ddp, *others = lines("outer")
    rows = [["`outer_lr`", "`outer_momentum`", "nats a byte", "over DDP's"]]
    for line in others:
        way = local_of(line["spec"])
        assert way is not None
        rows.append([f"{way.rate:g}", f"{way.momentum:g}", f"{nats(line):.3f}", f"{over(line, ddp):+.1f} %"])
    return rows


def written(page: str) -> str:
    """Return the page with the tables of the records."""
    for place, rows in {"losses": losses(), "outer steps": outer()}.items():
        page = filled(PAGE, page, place, rows)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
