"""A comparison's pictures: each model's loss against steps and against seconds, and a chart of all step times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laboratory.compare.plan import Plan
from laboratory.compare.summary import Line, Model, ms_of
from laboratory.compare.tables import named
from laboratory.report.plots import gaps, grid, legend_below, pyplot, save, style


def losses(plan: Plan, model: Model, path: Path) -> None:
    """Draw steps on the left, and on the right a panel for every cluster, hosts downwards, rates across."""
    down, across = len(plan.hosts), len(plan.rates)
    names = [named(cluster) for cluster in model["clusters"]]
    rows = [names[first : first + across] for first in range(0, len(names), across)]
    figure = pyplot().figure(figsize=(4.6 + 4.2 * across, 2.9 * max(down, 1.4) + 0.22 * len(plan.specs)), layout="constrained")
    axes = figure.subplot_mosaic([["steps", *row] for row in rows], sharey=True, width_ratios=[1.2, *[1] * across])
    for i, line in enumerate(model["training"]):
        steps = [float(step) for step in line["curve"]["step"]]
        _curve(axes["steps"], i, line, steps, label=f"{line['spec']}  ({line['compression']:,.0f} x)")
        for name, ms in zip(names, ms_of(line["spec"], model["clusters"]), strict=True):
            if ms is not None:
                _curve(axes[name], i, line, [step * ms / 1000 for step in steps])
    axes["steps"].set(xlabel="steps", ylabel="training loss (mean of 10 steps, standard error)")
    grid(axes["steps"])
    for name in names:
        axes[name].set(xlabel="seconds", title=name, xscale="log")
        grid(axes[name])
    axes["steps"].set_yscale("log")
    settings = model["settings"]
    trained = f"{plan.ranks} ranks of {settings['batch']}, {settings['steps']} steps, {plan.seeds} seeds"
    figure.suptitle(f"{model['parameters']:,} parameters: {trained}; seconds are steps x the step time of each cluster")
    legend_below(figure)
    save(figure, path)


def _curve(axes: Any, i: int, line: Line, x: Sequence[float], label: str | None = None) -> None:
    colour, mark, dashes = style(i, line["spec"])
    mean, error = gaps(line["curve"]["loss"]), gaps(line["curve"]["error"])
    marked = {"marker": mark, "markevery": max(1, len(x) // 10), "markersize": 4}
    axes.plot(x, mean, color=colour, linestyle=dashes, **marked, linewidth=1.2, label=label)
    low = [max(m - e, 0.05 * m) for m, e in zip(mean, error, strict=True)]
    axes.fill_between(x, low, [m + e for m, e in zip(mean, error, strict=True)], color=colour, alpha=0.18, linewidth=0)


def times(models: Sequence[Model], path: Path) -> None:
    """Draw a row for every model, a panel for every cluster, a bar for every spec."""
    specs = list(dict.fromkeys(line["spec"] for model in models for cluster in model["clusters"] for line in cluster["lines"]))
    across = len(models[0]["clusters"])
    size = (4.4 + 2.6 * across, 0.8 + len(models) * (0.6 + 0.28 * len(specs)))
    figure, panels = pyplot().subplots(
        len(models), across, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    every = [line["ms"] for model in models for cluster in model["clusters"] for line in cluster["lines"]]
    panels[0][0].set(xscale="log", xlim=(min(ms["low"] for ms in every) / 2, 10 * max(ms["high"] for ms in every)))
    panels[0][0].set_yticks(range(len(specs)), specs)
    for row, model in zip(panels, models, strict=True):
        row[0].set_ylabel(f"{model['parameters'] / 1e6:.1f} M parameters")
        row[0].tick_params(axis="y", labelsize="small")
        for axes, cluster in zip(row, model["clusters"], strict=True):
            _bars(axes, cluster["lines"], specs)
            axes.set_title(named(cluster), fontsize="medium")
    for axes in panels[-1]:
        axes.set_xlabel("ms a step (median, range)")
    panels[0][0].invert_yaxis()
    save(figure, path)


def _bars(axes: Any, lines: Sequence[Line], specs: Sequence[str]) -> None:
    grid(axes)
    axes.set_axisbelow(True)
    for line in lines:
        ms, at = line["ms"], specs.index(line["spec"])
        # The colours of the specs in the pictures of losses, which have no none.
        colour = "lightgrey" if line["spec"] == "none" else style(at - specs.count("none"), line["spec"]).colour
        reach = [[ms["median"] - ms["low"]], [ms["high"] - ms["median"]]]
        axes.barh(at, ms["median"], xerr=reach, color=colour, alpha=0.8, error_kw={"elinewidth": 1, "ecolor": "grey"})
        placed = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": "small"}
        axes.annotate(f"{ms['median']:,.0f}", (ms["high"], at), **placed)
