"""The tables of docs/usual-loops.md, from the records of `scripts/lab loops` and `scripts/lab strangers`.

PYTHONPATH=scripts python -m documentation.usual_loops    writes them anew
"""

from __future__ import annotations

from typing import Any

from laboratory.commands.strangers import summary
from laboratory.machine import ROOT
from laboratory.report import figure, filled, read

PAGE = ROOT / "docs" / "usual-loops.md"
RECORDS = ROOT / "benchmarks" / "results"
SPECS = ("topk", "sdagc", "orq")
KINDS = ("sgd", "adamw")
OF_PROGRAMS = {
    "": "without gradcomp",
    "dense": "`dense`",
    "topk:ratio=1,momentum=0,wire=exact": "all entries, exactly",
    "topk": "`topk`",
}


def cells(door: str) -> dict[tuple[str, str, str], Any]:
    """Read a door's trainings, by loop, kind of optimizer, and spec. Later records are of single loops, trained anew."""
    found: dict[tuple[str, str, str], Any] = {}
    for record in (RECORDS / f"loops-{door}.json", *sorted(RECORDS.glob(f"loops-{door}-*.json"))):
        for line in read(record)["cells"]:
            name, _, kind, spec = line["key"]
            found[name, kind, spec] = line
    return found


def loops() -> list[list[str]]:
    """Write a row for each loop under DDP: the scores of DDP alone and of each spec, by SGD and by AdamW."""
    by_key = cells("ddp")
    rows = [["loop", "alone", *(f"`{spec}`" for spec in SPECS)]]
    for name in dict.fromkeys(name for name, _, _ in by_key):
        kinds = [kind for kind in KINDS if (name, kind, SPECS[0]) in by_key]
        alone = "/".join(figure(by_key[name, kind, SPECS[0]]["plain"], "{:.1f}", "refused") for kind in kinds)
        rows.append([name, alone, *("/".join(cell(by_key[name, kind, spec]) for kind in kinds) for spec in SPECS)])
    return rows


def cell(line: dict[str, Any]) -> str:
    """Write a score, and how it compares where it is below that of DDP alone."""
    if line["score"] is None:
        return str(line["verdict"])
    word = {"late": " later", "warned": " warned", "worse": " worse"}.get(line["verdict"], "")
    return f"{line['score']:.1f}{word}"


def programs() -> list[list[str]]:
    """Write a row for each program of others that CPUs can run: its outcome without gradcomp and under each spec."""
    rows = [["program", *OF_PROGRAMS.values()]]
    lines = {(line["program"], line["spec"]): line for line in read(RECORDS / "strangers.json")["lines"]}
    for program in dict.fromkeys(program for program, _ in lines):
        outcomes = [summary(lines[program, spec]) if (program, spec) in lines else "-" for spec in OF_PROGRAMS]
        rows += [[f"`{program}`", *outcomes]] if not outcomes[0].startswith("failed") else []
    return rows


def written(page: str) -> str:
    """Return the page with the tables of the records."""
    return filled(PAGE, filled(PAGE, page, "loops", loops()), "programs", programs())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
