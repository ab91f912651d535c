"""The tables of docs/results.md that hold records of `scripts/lab accuracy`: steps on clusters, and final scores.

PYTHONPATH=scripts python -m documentation.step_times    writes them anew
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laboratory.commands.accuracy import DOORS, cluster
from laboratory.harness.measured import records
from laboratory.report.tables import markdown

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "accuracy"
PAGE = ROOT / "docs" / "results.md"
TASKS = {"cifar-large": "CIFAR, SGD", "shakespeare": "text, AdamW"}
RATES = ("100mbit", "1gbit", "10gbit", "none")
HOSTS = (4, 8)


def launches(task: str, door: str) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Read the lines of every launch, by hosts and rate."""
    found = {}
    for record in records(RECORDS / "launches"):
        key = record["key"]
        if (key["task"], key["door"]) == (task, door) and key["hosts"] in HOSTS:
            found[key["hosts"], key["rate"]] = record["lines"]
    return found


def steps(task: str, door: str) -> str:
    """Write the milliseconds of a step: a row for each way, a column for each cluster."""
    every = launches(task, door)
    places = [(hosts, rate) for hosts in HOSTS for rate in RATES if (hosts, rate) in every]
    ways = list(dict.fromkeys(line["way"] for place in places for line in every[place]))
    rows = [["ms a step", *(cluster(*place) for place in places)]]
    for way in ways:
        ms = [next((line["ms"]["median"] for line in every[place] if line["way"] == way), None) for place in places]
        rows.append([f"`{way}`", *("" if each is None else f"{each:,.0f}" for each in ms)])
    return markdown(rows)


def scores() -> str:
    """Write the final scores of every way, each with the best learning rate that was tried."""
    found: dict[str, dict[str, list[float]]] = {}
    for record in records(RECORDS / "courses"):
        key = record["key"]
        if not key.get("rate") and key["task"] in TASKS:
            found.setdefault(key["way"], {}).setdefault(key["task"], []).append(record["scores"][-1][2])
    best = {"cifar-large": max, "shakespeare": min}
    rows = [["way", "CIFAR, accuracy in %", "text, perplexity"]]
    rows += [
        [f"`{way}`", *(f"{best[task](of):.2f}" if (of := found[way].get(task)) else "" for task in TASKS)]
        for way in sorted(found, key=lambda way: -max(found[way].get("cifar-large", [0])))
    ]
    return markdown(rows)


def sections() -> Iterator[tuple[str, str]]:
    """List the tables, by the name of the place in the page."""
    for task, about in TASKS.items():
        for door, called in DOORS.items():
            yield f"{about}, {called}", steps(task, door)
    yield "final scores", scores()


def written(page: str) -> str:
    """Return the page with the tables of the records."""
    for place, table in sections():
        mark, end = f"<!-- records: {place} -->", "<!-- end -->"
        if page.count(mark) != 1:
            raise ValueError(f"docs/results.md has {page.count(mark)} places {mark}; it needs one")
        before, _, after = page.partition(mark)
        page = f"{before}{mark}\n\n{table}\n\n{end}{after.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
