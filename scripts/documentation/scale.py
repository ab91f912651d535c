"""The chart of docs/results.md and the table of benchmarks/step-times.md on more hosts, from the record of `scripts/lab scale`.

PYTHONPATH=scripts python -m documentation.scale    writes them anew
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from documentation.charts import Curve, Sheet, curves
from laboratory.machine import ROOT
from laboratory.report import filled, read

PAGE, CHART, RECORD = (
    ROOT / "benchmarks" / "step-times.md",
    ROOT / "docs" / "charts" / "scale.svg",
    ROOT / "benchmarks" / "results" / "scale.json",
)
# The specs of the chart, and what it calls them.
NAMES = {
    "stock": "stock",
    "bf16": "bf16",
    "powersgd:rank=4": "PowerSGD 4",
    "blocks": "blocks",
    "orq": "orq",
    "topk": "topk",
    "topk:route=split": "topk, split",
    "topk:route=tree": "topk, tree",
    "gs_sgd": "gs_sgd",
    "topk:by_host=true": "topk, by host",
}
THEIRS = ("stock", "bf16", "powersgd:rank=4")
# The numbers of hosts in the table. Messages and memory are those with the most.
HOSTS = (4, 16, 64, 1024)

Lines = Mapping[str, Mapping[int, Mapping[str, Any]]]


def by_spec() -> Lines:
    """Return the record's lines by spec and hosts."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for line in read(RECORD)["lines"]:
        found.setdefault(line["spec"], {})[line["hosts"]] = line
    return found


def chart() -> str:
    """Draw the bytes at a host's interface, by the number of hosts."""
    sheet, lines = Sheet("Megabytes at a host's interface in a step, as hosts are added"), by_spec()
    hosts = sorted(lines["stock"])
    sheet.heading("Megabytes at a host's interface in a step, by hosts")
    drawn = [
        Curve(name, spec not in THEIRS, [lines[spec][n]["interface_bytes"] / 1e6 for n in hosts])
        for spec, name in NAMES.items()
    ]
    curves(sheet, drawn, [f"{n:,}" for n in hosts], 220)
    return sheet.svg()


def table() -> list[list[str]]:
    """Write a row for each spec: megabytes with a few and with many hosts, and what many take besides."""
    lines = by_spec()
    rows = [
        ["spec", *(f"{hosts:,} hosts" for hosts in HOSTS), *(f"{each}, {HOSTS[-1]:,}" for each in ("messages", "MB received"))]
    ]
    for spec in NAMES:
        of, many = lines[spec], lines[spec][HOSTS[-1]]
        megabytes = [f"{of[hosts]['interface_bytes'] / 1e6:,.1f}" for hosts in HOSTS]
        rows.append([f"`{spec}`", *megabytes, f"{many['messages']:,}", f"{many['received_bytes'] / 1e6:,.1f}"])
    return rows


def written(page: str) -> str:
    """Return the page with the table of the record."""
    return filled(PAGE, page, "scale", table())


if __name__ == "__main__":
    CHART.write_text(chart())
    PAGE.write_text(written(PAGE.read_text()))
