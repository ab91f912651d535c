"""Bytes and seconds of each phase of lgc, for several of its configurations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import gradcomp
from laboratory.lgc import job
from laboratory.report.tables import figure
from laboratory.tasks.training import Grads

# Measured steps of the first phase and of the last one.
DENSE, CODE = 20, 100

Row = dict[str, Any]


def measure(
    name: str, knobs: str, ratio: float, learn: int, seed: int, ranks: int, tell: Callable[[str, float], object]
) -> list[Row]:
    """Return a row for each phase. Seconds are one rank's share of a step's exchange, without a network."""
    spec = f"{name}:ratio={ratio}"
    if name == "lgc":
        spec += f",dense={DENSE},learn={learn}"
    spec += f",{knobs}" if knobs else ""
    steps = DENSE + learn + CODE if name == "lgc" else DENSE
    noted: dict[str, list[tuple[float, list[int], float, float]]] = {}

    def see(simulation: gradcomp.Simulation, grads: list[Grads]) -> Grads:
        before = simulation.stats().get("learning_seconds", 0.0)
        began = time.perf_counter()
        update = simulation.step(grads)
        seconds, stats = (time.perf_counter() - began) / ranks, simulation.stats()
        learning = stats.get("learning_seconds", 0.0) - before
        error = stats.get("code_error", 0.0)
        noted.setdefault(stats.get("phase", name), []).append((seconds, simulation.bytes_sent, learning, error))
        return update

    for step, _ in enumerate(job.walk(spec, steps, seed, ranks, see), 1):
        tell(f"{spec}  step {step} of {steps}", step / steps)
    return [{"spec": spec, "phase": phase, **_figures(phase, notes)} for phase, notes in noted.items()]


def _figures(phase: str, notes: list[tuple[float, list[int], float, float]]) -> Row:
    """Return medians of times and means of bytes. Only means show the last learning step, which sends the agreed weights."""
    return {
        "steps": len(notes),
        "leader_bytes": statistics.median(max(sent) for _, sent, _, _ in notes),
        "other_bytes": statistics.median(min(sent) for _, sent, _, _ in notes),
        "mean_bytes": statistics.fmean(statistics.fmean(sent) for _, sent, _, _ in notes),
        "seconds": statistics.median(seconds for seconds, _, _, _ in notes),
        "learning_seconds": statistics.median(learning for _, _, learning, _ in notes),
        "error": statistics.fmean(error for _, _, _, error in notes) if phase == "code" else None,
    }


def table(rows: list[Row], topk: Row) -> list[list[str]]:
    """Make the rows of the table. Bytes are compared with topk's."""
    heads = ["spec", "phase", "steps", "leader's bytes", "others'", "mean / topk's", "ms a step", "learning", "error"]
    cells, shown = [heads], set()
    for row in rows:
        if row["phase"] == "dense" and "dense" in shown:
            continue  # the same for all
        shown.add(row["phase"])
        cells.append(
            [
                row["spec"],
                row["phase"],
                str(row["steps"]),
                f"{row['leader_bytes']:,.0f}",
                f"{row['other_bytes']:,.0f}",
                f"{row['mean_bytes'] / topk['mean_bytes']:.2f}",
                f"{1000 * row['seconds']:.1f}",
                f"{1000 * row['learning_seconds']:.1f}" if row["learning_seconds"] else "",
                figure(row["error"], "{:.2f}", ""),
            ]
        )
    return cells
