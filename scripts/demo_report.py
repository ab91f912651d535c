"""What the demo says in the end: a small table, and a plot of the training loss against the bytes sent."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]
HEADINGS = ("", "step time (median)", "bytes sent per step", "compression", "test accuracy", "final loss")
LAST = 10  # steps whose mean is the final loss


def compression(result: Result) -> float:
    """Dense float32 bytes over the bytes sent."""
    return float(4 * result["parameters"] / result["bytes_per_step"])


def row(result: Result) -> tuple[str, ...]:
    name = "Horovod, dense" if result["spec"] == "dense" else result["spec"]
    return (
        name,
        f"{1000 * statistics.median(result['seconds']):.0f} ms",
        f"{result['bytes_per_step']:,}",
        f"{compression(result):.0f} x",
        f"{100 * result['accuracy']:.1f} %",
        f"{statistics.mean(result['losses'][-LAST:]):.4f}",
    )


def table(results: Sequence[Result]) -> str:
    """One line for each training, in columns."""
    rows = [HEADINGS, *map(row, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(r, widths, strict=True))
        )
        for r in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    lines += [
        f"{result['spec']}: the ranks' weights DIFFER after the training" for result in results if not result["ranks_equal"]
    ]
    return "\n".join(lines)


def smooth(losses: Sequence[float], over: int = 5) -> list[float]:
    """The mean of each step and the few before it."""
    return [statistics.mean(losses[max(0, i + 1 - over) : i + 1]) for i in range(len(losses))]


def plot(results: Sequence[Result], path: Path) -> Path:
    """Draws the loss of each training against what a rank has sent so far."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for result in results:
        sent = list(itertools.accumulate([result["bytes_per_step"]] * len(result["losses"])))
        axes.plot([bytes_ / 1e6 for bytes_ in sent], smooth(result["losses"]), label=row(result)[0])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("MB sent by a rank")
    axes.set_ylabel("training loss (mean of 5 steps)")
    axes.set_title(f"Digits, {results[0]['ranks']} ranks, {len(results[0]['losses'])} steps")
    axes.grid(which="both", alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
