"""Redundancy between ranks' gradients: their correlation, and the errors of codes that exploit it.

A net is trained with entries that travel as they are. Three autoencoders learn from these entries; each step's entries test
them before they learn from them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradcomp
from gradcomp.compressors.lgc.autoencoder import Autoencoder
from gradcomp.compressors.lgc.common_places import PlaceSelection
from gradcomp.core.requests import World
from gradcomp.native.memory import Memory
from laboratory import stats
from laboratory.lgc import job
from laboratory.report import plots
from laboratory.tasks.training import Grads

# Title of every curve.
CURVES = {
    "correlation": "of two ranks' entries, the sent ones",
    "correlation_everywhere": "of two ranks' entries, all",
    "mean_from_all": "mean of all ranks, from the mean of all their codes",
    "mean_from_leader": "mean of all ranks, from the leader's code alone",
    "own_from_own": "a rank's entries, from its own code",
    "own_from_leader": "a rank's entries, from another's code",
}
# Steps before the measurement.
DENSE = 20


def measure(ratio: float, steps: int, seed: int, ranks: int, tell: Callable[[str, float], object]) -> dict[str, list[float]]:
    """Return every step's correlations and relative errors."""
    found: dict[str, list[float]] = {name: [] for name in CURVES}
    of_all, of_leader, of_own = (Autoencoder(1, False, True, seed, torch.device("cpu")) for _ in range(3))
    done, memory, accs = 0, Memory(), job.Accs()

    def see(simulation: gradcomp.Simulation, grads: list[Grads]) -> Grads:
        nonlocal done
        done += 1
        update = simulation.step(grads)
        value = accs.pop()
        if done > DENSE:
            leading = [
                PlaceSelection(
                    value.shape[1], World(rank, ranks), done, ratio=ratio, leader="parts", bands=16, packed=True, seed=seed
                )
                for rank in range(ranks)
            ]
            leaders = leading[0].leaders
            chosen = [leading[leader].choose(value[leader], memory) for leader in leaders]
            places = [leading[0].locate(own["places"], row) for row, own in enumerate(chosen)]
            rows = torch.stack([value[:, at] / own["scale"] for at, own in zip(places, chosen, strict=True)], 1)
            led = torch.stack([rows[leader, row] for row, leader in enumerate(leaders)])
            others = torch.stack([rows[(leader + 1) % ranks, row] for row, leader in enumerate(leaders)])
            found["correlation"].append(_correlation(rows.flatten(1)))
            found["correlation_everywhere"].append(_correlation(value))
            own_rows = rows.flatten(0, 1)[None]
            for coder, name, given, wanted in (
                (of_all, "mean_from_all", rows, rows.mean(0)),
                (of_leader, "mean_from_leader", led[None], rows.mean(0)),
                (of_own, "own_from_own", own_rows, own_rows[0]),
            ):
                found[name].append(_error(_decoded(coder, given), wanted))
                coder.learn(lambda weights, c=coder, g=given, w=wanted: (_decoded(c, g, weights) - w).square().mean())
            found["own_from_leader"].append(_error(_fitted(_decoded(of_own, led[None]), others), others))
        return update

    spec = f"lgc:ratio={ratio},dense={DENSE},learn={steps}"
    for step, _ in enumerate(job.walk(spec, steps, seed, ranks, see, accs), 1):
        tell(f"redundancy  step {step} of {steps}", step / steps)
    return found


def _decoded(coder: Autoencoder, rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Decode the mean of the rows' codes over the first dimension."""
    codes = coder.encode(rows.flatten(0, 1), weights).unflatten(0, rows.shape[:2]).mean(0)
    return coder.decode(codes, rows.shape[2], weights=weights)[:, 0]


def _fitted(decoded: Tensor, wanted: Tensor) -> Tensor:
    """Scale by the best factor: another rank's code decodes to entries that are too large."""
    return decoded * (decoded * wanted).sum() / decoded.square().sum().clamp(min=1e-30)


def _error(decoded: Tensor, wanted: Tensor) -> float:
    return float((decoded - wanted).norm() / wanted.norm())


def _correlation(rows: Tensor) -> float:
    """Return the mean correlation over all pairs of rows."""
    found = torch.corrcoef(rows)
    return float((found.sum() - found.trace()) / (len(rows) * (len(rows) - 1)))


def draw(found: dict[str, list[float]], title: str, path: Path) -> None:
    """Draw correlations and errors of codes over the steps."""
    figure, (left, right) = plots.pyplot().subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for i, (name, label) in enumerate(CURVES.items()):
        axes = left if name.startswith("correlation") else right
        curve = stats.smooth(found[name])
        axes.plot([DENSE + 1 + step for step in range(len(curve))], curve, f"C{i}", label=label, linewidth=1.3)
    left.set_ylabel("correlation (mean of 10 steps)")
    right.set_ylabel("relative error (mean of 10 steps)")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        plots.grid(axes)
        axes.legend(fontsize="small", frameon=False)
    figure.suptitle(title)
    plots.save(figure, path)


def summary(found: dict[str, list[float]]) -> dict[str, Any]:
    """Average the last third of the steps."""
    return {name: sum(curve[-len(curve) // 3 :]) / len(curve[-len(curve) // 3 :]) for name, curve in found.items()}
