"""Bytes and seconds of each phase of lgc, for several of its configurations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from studylib.train import Grads

import gradcomp
from lgclib import job

DENSE, CODE = 20, 100
"""Steps of the first phase and of the last one that are measured."""

Row = dict[str, Any]


def measure(name: str, knobs: str, ratio: float, learn: int, seed: int, ranks: int, tell: Callable[[str], object]) -> list[Row]:
    """A row for each phase. Seconds are of one rank's part of a step's exchange, without a network."""
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
        tell(f"{spec}  step {step} of {steps}")
    return [{"spec": spec, "phase": phase, **_figures(phase, notes)} for phase, notes in noted.items()]


def _figures(phase: str, notes: list[tuple[float, list[int], float, float]]) -> Row:
    """Medians, so that the one step that ends learning, in which weights are agreed upon, counts in the mean only."""
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
    """For report.table. topk is what others' bytes are compared with."""
    heads = ["spec", "phase", "steps", "leader's bytes", "others'", "mean / topk's", "ms a step", "of it learning", "error"]
    cells, said = [heads], set()
    for row in rows:
        if row["phase"] == "dense" and "dense" in said:
            continue  # it is the same for all
        said.add(row["phase"])
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
                "" if row["error"] is None else f"{row['error']:.2f}",
            ]
        )
    return cells
