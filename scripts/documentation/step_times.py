"""The tables of docs/results.md that hold records of `scripts/lab accuracy`: steps on clusters, and final scores.

PYTHONPATH=scripts python -m documentation.step_times    writes them anew
"""

from __future__ import annotations

from laboratory.commands.accuracy import DOORS, HOSTS, LINKS, RECORDS, cluster, curves, launched
from laboratory.machine import ROOT
from laboratory.report import figure, filled, markdown

PAGE = ROOT / "docs" / "results.md"
TASKS = {"cifar-large": "CIFAR, SGD", "shakespeare": "text, AdamW"}


def steps(task: str, door: str) -> str:
    """Write the milliseconds of a step: a row for each way, a column for each cluster."""
    every = {place: record["lines"] for place, record in launched(RECORDS, task, door).items()}
    places = [(hosts, rate) for hosts in HOSTS for rate in LINKS if (hosts, rate) in every]
    ways = list(dict.fromkeys(line["way"] for place in places for line in every[place]))
    rows = [["ms a step", *(cluster(*place) for place in places)]]
    for way in ways:
        ms = [next((line["ms"]["median"] for line in every[place] if line["way"] == way), None) for place in places]
        rows.append([f"`{way}`", *("" if each is None else f"{each:,.0f}" for each in ms)])
    return markdown(rows)


def scores() -> str:
    """Write the final scores of every way, each with the best learning rate that was tried."""
    ends = {task: {way: curve[-1][1] for way, (_, curve) in curves(task, RECORDS)[0].items()} for task in TASKS}
    ways = sorted(dict.fromkeys(way for own in ends.values() for way in own), key=lambda way: -ends["cifar-large"].get(way, 0))
    rows = [[f"`{way}`", *(figure(own.get(way), "{:.2f}", "") for own in ends.values())] for way in ways]
    return markdown([["way", "CIFAR, accuracy in %", "text, perplexity"], *rows])


def written(page: str) -> str:
    """Return the page with the tables of the records."""
    tables = {f"{about}, {called}": steps(task, door) for task, about in TASKS.items() for door, called in DOORS.items()}
    for place, table in {**tables, "final scores": scores()}.items():
        page = filled(PAGE, page, place, table)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
