"""The tables of docs/usual-loops.md, from the records of `scripts/lab loops`.

PYTHONPATH=scripts python -m documentation.usual_loops    writes them anew
"""

from __future__ import annotations

from typing import Any

from laboratory.commands.loops import DOORS
from laboratory.machine import ROOT
from laboratory.report import figure, filled, read

PAGE = ROOT / "docs" / "usual-loops.md"
SPECS = ("topk", "sdagc", "orq", "auto")
KINDS = ("sgd", "adamw")


def table(door: str) -> list[list[str]]:
    """Write a row for each loop: the scores of the door alone and of each spec, by SGD and by AdamW."""
    record = read(ROOT / "benchmarks" / "results" / f"loops-{door}.json")
    by_key: dict[tuple[str, str, str], Any] = {}
    for line in record["cells"]:
        name, _, kind, spec = line["key"]
        by_key[name, kind, spec] = line
    rows = [["loop", "alone", *(f"`{spec}`" for spec in SPECS)]]
    for name in dict.fromkeys(name for name, _, _ in by_key):
        kinds = [kind for kind in KINDS if (name, kind, SPECS[0]) in by_key]
        alone = " / ".join(figure(by_key[name, kind, SPECS[0]]["plain"], "{:.1f}", "refused") for kind in kinds)
        rows.append([name, alone, *(" / ".join(cell(by_key[name, kind, spec]) for kind in kinds) for spec in SPECS)])
    return rows


def cell(line: dict[str, Any]) -> str:
    """Write a score, and how it compares where it is below that of the door alone."""
    if line["verdict"] == "late":
        longer = line["longer"]
        return f"{line['score']:.1f} (later {longer['score']:.1f}, alone {longer['plain']:.1f})"
    if line["score"] is None:
        return str(line["verdict"])
    return f"{line['score']:.1f}" + (f" {line['verdict']}" if line["verdict"] in ("warned", "worse") else "")


def written(page: str) -> str:
    """Return the page with the tables of the records."""
    for door in DOORS:
        page = filled(PAGE, page, door, table(door))
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
