"""The table and the chart of docs/local-steps.md, from the record of `scripts/lab study`.

PYTHONPATH=scripts python -m documentation.local_steps    writes it anew
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from documentation.charts import Bounded, Sheet, bounds
from laboratory.harness.ways import LocalWay, local_of
from laboratory.machine import ROOT
from laboratory.report import filled, read
from laboratory.stats import upper_bound

PAGE = ROOT / "docs" / "local-steps.md"
CHART = ROOT / "docs" / "charts" / "local-steps.svg"


def lines(name: str) -> list[dict[str, Any]]:
    """Return a study's lines, DDP's first."""
    (task,) = read(ROOT / "benchmarks" / "results" / f"study-local-{name}.json")["tasks"].values()
    found: list[dict[str, Any]] = task["lines"]
    return found


def way_of(line: dict[str, Any]) -> LocalWay:
    """Return the local steps of a line that is not DDP's."""
    way = local_of(line["spec"])
    assert way is not None
    return way


def nats(line: dict[str, Any]) -> float:
    """Return the loss of a held-out byte, over the seeds."""
    return statistics.fmean(math.log(score) for score in line["scores"])


def over(line: dict[str, Any], dense: dict[str, Any]) -> float:
    """Return how much larger a loss is than DDP's with the same seeds, in percent."""
    same = {**dense, "scores": [dense["scores"][dense["seeds"].index(seed)] for seed in line["seeds"]]}
    return 100 * (nats(line) / nats(same) - 1)


def losses() -> list[list[str]]:
    """Write a row for each way: its loss, how much larger it is than DDP's, and its bytes."""
    ddp, *others = lines("steps")
    rows = [["way", "nats a byte", "over DDP's", "bytes, DDP's / sent", "seeds"]]
    rows.append(["DDP", f"{nats(ddp):.3f}", "", "1 x", str(len(ddp["seeds"]))])
    for line in others:
        way = way_of(line)
        written = f"`every={way.every}`, `{way.spec}`"
        ratio = f"{line['compression']:,.0f} x"
        rows.append([written, f"{nats(line):.3f}", f"{over(line, ddp):+.1f} %", ratio, str(len(line["seeds"]))])
    return rows


def loss_above(score: float, ddp: float) -> float:
    """Return how much larger a loss is than DDP's, in percent, from both perplexities."""
    return 100 * (math.log(score) / math.log(ddp) - 1)


def points_below(score: float, ddp: float) -> float:
    """Return the points between two accuracies."""
    return ddp - score


def rows(name: str, worse: Callable[[float, float], float]) -> list[Bounded]:
    """Return how much worse each way of a study is than DDP with the same seeds, with a bound over these."""
    ddp, *others = lines(name)
    found = []
    for line in others:
        way = way_of(line)
        by = [worse(*both) for both in zip(line["scores"], ddp["scores"], strict=True)]
        found.append(
            Bounded(f"every {way.every}, {way.spec}", line["compression"], statistics.fmean(by), upper_bound(by), True)
        )
    return found


def chart() -> str:
    """Draw how much worse than DDP each way ends, by its ratio of bytes."""
    sheet = Sheet("What local steps lose, by the ratio of bytes")
    sheet.heading("Text: loss of a held-out byte above DDP's, percent")
    bounds(sheet, rows("steps", loss_above), "{:.1f}")
    sheet.heading(f"CIFAR-10: points below DDP's {lines('cifar')[0]['score']:.1f} %")
    bounds(sheet, rows("cifar", points_below), "{:.1f}")
    return sheet.svg()


def written(page: str) -> str:
    """Return the page with the table of the record."""
    return filled(PAGE, page, "losses", losses())


if __name__ == "__main__":
    CHART.write_text(chart())
    PAGE.write_text(written(PAGE.read_text()))
