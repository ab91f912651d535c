"""What ranks' gradients have in common, which is what lgc lives on: how they correlate, and what codes make of it.

While a net is trained with entries that travel as they are, three autoencoders learn from them beside it, and are tried on each
step's entries before they learn from them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from studylib import plots, stats
from studylib.train import Grads
from torch import Tensor

import gradcomp
from gradcomp.compressors.lgc.autoencoder import Autoencoder
from gradcomp.compressors.lgc.common_places import Leading
from gradcomp.native.memory import Memory
from gradcomp.requests import World
from lgclib import job

CURVES = {
    "correlation": "of two ranks' entries, at the places that are sent",
    "correlation_everywhere": "of two ranks' entries, of all",
    "mean_from_all": "mean of all ranks, from the mean of all their codes",
    "mean_from_leader": "mean of all ranks, from the leader's code alone",
    "own_from_own": "a rank's entries, from its own code",
    "own_from_leader": "a rank's entries, from another's code",
}
DENSE = 20


def measure(ratio: float, steps: int, seed: int, ranks: int, tell: Callable[[str], object]) -> dict[str, list[float]]:
    """Every step's figures: correlations, and relative errors."""
    found: dict[str, list[float]] = {name: [] for name in CURVES}
    of_all, of_leader, of_own = (Autoencoder(1, False, True, seed, torch.device("cpu")) for _ in range(3))
    done, memory = 0, Memory()

    def see(simulation: gradcomp.Simulation, grads: list[Grads]) -> Grads:
        nonlocal done
        done += 1
        if done > DENSE:
            everything, middle = job.accumulated(simulation, grads)
            value = everything[:, middle]
            leading = [
                Leading(value.shape[1], ratio, "parts", 16, True, seed, World(rank, ranks), done) for rank in range(ranks)
            ]
            leaders = leading[0].leaders
            chosen = [leading[leader].choose(value[leader], memory) for leader in leaders]
            places = [leading[0].places_of(own["places"], row) for row, own in enumerate(chosen)]
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
                found[name].append(_error(_said(coder, given), wanted))
                coder.learn(lambda weights, c=coder, g=given, w=wanted: (_said(c, g, weights) - w).square().mean())
            found["own_from_leader"].append(_error(_fitted(_said(of_own, led[None]), others), others))
        return simulation.step(grads)

    for step, _ in enumerate(job.walk(f"lgc:ratio={ratio},dense={DENSE},learn={steps}", steps, seed, ranks, see), 1):
        tell(f"redundancy  step {step} of {steps}")
    return found


def _said(coder: Autoencoder, rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """What the mean over the first dimension of the rows' codes decodes to."""
    codes = coder.encode(rows.flatten(0, 1), weights).unflatten(0, rows.shape[:2]).mean(0)
    return coder.decode(codes, rows.shape[2], weights=weights)[:, 0]


def _fitted(said: Tensor, wanted: Tensor) -> Tensor:
    """Times the factor that makes most of it: what another's code says is said too loudly."""
    return said * (said * wanted).sum() / said.square().sum().clamp(min=1e-30)


def _error(said: Tensor, wanted: Tensor) -> float:
    return float((said - wanted).norm() / wanted.norm())


def _correlation(rows: Tensor) -> float:
    """The mean over all pairs of rows."""
    found = torch.corrcoef(rows)
    return float((found.sum() - found.trace()) / (len(rows) * (len(rows) - 1)))


def draw(found: dict[str, list[float]], said: str, path: Path) -> Path:
    """Two panels over the steps: correlations, and errors of codes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
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
    figure.suptitle(said)
    return plots.save(figure, path)


def summary(found: dict[str, list[float]]) -> dict[str, Any]:
    """Means over the last third of the steps."""
    return {name: sum(curve[-len(curve) // 3 :]) / len(curve[-len(curve) // 3 :]) for name, curve in found.items()}
