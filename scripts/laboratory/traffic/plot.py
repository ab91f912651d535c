"""The picture of `lab traffic`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laboratory.report.plots import grid, legend_below, pyplot, save


def draw(
    size: int, runs: Sequence[Mapping[str, Any]], simulated: Mapping[str, Sequence[Mapping[str, Any]]], path: Path
) -> None:
    """Draw bytes and messages against the number of ranks: of the rank that sends most, and the mean."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(12, 6.4), layout="constrained")
    for i, (spec, points) in enumerate(simulated.items()):
        colour = "black" if spec == "dense" else f"C{i % 10}"
        counts = [each["ranks"] for each in points]
        left.plot(counts, [each["bytes"]["most"] for each in points], color=colour, label=spec)
        left.plot(counts, [each["bytes"]["mean"] for each in points], color=colour, linestyle=":")
        right.plot(counts, [each["messages"]["most"] for each in points], color=colour)
        for run in runs:
            (own,) = [each["of_ranks"]["payload"] for each in run["lines"] if each["spec"] == spec]
            left.plot([run["ranks"]], [max(own)], color=colour, marker="o", fillstyle="none")
    left.set_ylabel("bytes in a step; circles: measured")
    right.set_ylabel("messages in a step, empty ones too")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("ranks")
        grid(axes)
    figure.suptitle(f"Bytes of the rank that sends most (dotted: mean) for {size:,} entries, without headers and preambles")
    legend_below(figure, ncols=3)
    save(figure, path)
