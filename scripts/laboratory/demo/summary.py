"""The demo's result: a small table, and a plot of the training loss against the bytes sent."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laboratory.report.plots import grid, pyplot, save
from laboratory.stats import smooth

Result = dict[str, Any]
HEADINGS = ("", "step time (median)", "bytes sent per step", "compression", "test accuracy", "training loss")

# Steps that the loss of the table, of the progress and of a point of the curve averages.
AVERAGED = 10

EXPLANATION = f"""bytes sent per step: what one rank hands to the network
test accuracy: on pictures that no rank trained on
training loss: mean of the last {AVERAGED} steps over both ranks; unsent entries wait for later steps, so a short compressed
training ends behind a dense one"""


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Make the table's rows, one for each training."""
    return [HEADINGS, *map(_row, results)]


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw the loss of each training against the bytes that a rank has sent so far."""
    figure, axes = pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    for result in results:
        sent = itertools.accumulate([result["bytes_per_step"] / 1e6] * len(result["losses"]))
        axes.plot(list(sent), smooth(result["losses"], AVERAGED), label=_title(result))
    axes.set(xscale="log", yscale="log", xlabel="MB sent by a rank", ylabel=f"training loss (mean of {AVERAGED} steps)")
    axes.set_title(f"Digits, {results[0]['ranks']} ranks, {len(results[0]['losses'])} steps")
    grid(axes)
    axes.legend()
    save(figure, path)


def _title(result: Result) -> str:
    return "Horovod, dense" if result["spec"] == "dense" else str(result["spec"])


def _row(result: Result) -> tuple[str, ...]:
    return (
        _title(result),
        f"{1000 * statistics.median(result['seconds']):.0f} ms",
        f"{result['bytes_per_step']:,}",
        f"{4 * result['parameters'] / result['bytes_per_step']:.0f} x",
        f"{100 * result['accuracy']:.1f} %",
        f"{statistics.mean(result['losses'][-AVERAGED:]):.4f}",
    )
