"""The figures of docs/predict.md are those of the records that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "predict.md").read_text().replace("(at most ", "(")


def runs(name: str) -> list[Any]:
    """Return the runs of a record."""
    return json.loads((RESULTS / f"train-never-{name}.json").read_text())["runs"]


def figures(run: Any, part: str = "over") -> str:
    """Write auto's cells of a row: its time over stock's and over the bf16 hook's."""
    (line,) = (line for line in run["lines"] if line["way"] == "auto")
    stock, bf16 = line[part]["stock"], line[part]["bf16"]
    return f"{stock['median']:.2f} ({stock['at_most']:.2f}) | {bf16['median']:.2f} ({bf16['at_most']:.2f}) |"


@pytest.mark.parametrize("name", ["ddp-cifar-large", "ddp-cifar-large-unshaped", "slower", "faster"])
def test_auto_is_as_fast_as_the_page_says(name: str) -> None:
    for run in runs(name):
        if name == "ddp-cifar-large" and run["rate"] == "none":
            continue  # the longer run of -unshaped has it
        parts = ("over_before", "over_after") if run["later"] else ("over",)
        for part in parts:
            assert figures(run, part) in PAGE, (name, run["rate"], part)
