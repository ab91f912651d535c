"""Two pictures of a prediction: speed against bandwidth, and against ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradcomp.prediction.link import Link
from gradcomp.prediction.peers import NONE, STOCK
from gradcomp.prediction.predict import Cluster
from gradcomp.prediction.result import Prediction, crossovers
from gradcomp.prediction.sweep import Sweep

# The lines of a picture, beside stock and half precision: those that are fastest somewhere come first.
MOST_LINES = 8

# Bandwidths in bit/s, and the most ranks.
BANDWIDTHS = [10 ** (8 + i / 8) for i in range(25)]
MOST_RANKS = 1024

ALWAYS = (NONE, STOCK, "bf16")


def check() -> None:
    """Refuse to begin without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("--plots needs matplotlib, which is not installed here: pip install matplotlib") from None


def draw(folder: Path, sweep: Sweep, cluster: Cluster) -> list[Path]:
    """Draw both pictures. Return their files."""
    if not isinstance(cluster.times, Link):
        raise ValueError("pictures need a link that can be changed; give a bandwidth")
    folder.mkdir(parents=True, exist_ok=True)
    link = cluster.times
    by_rate = [sweep.prediction(cluster._replace(times=link._replace(bandwidth=rate / 8))) for rate in BANDWIDTHS]
    of_host = cluster.ranks // (cluster.hosts or cluster.ranks)
    counts = [of_host << i for i in range(1, 11) if of_host << i <= MOST_RANKS]
    by_ranks = [sweep.prediction(cluster._replace(ranks=count, hosts=count // of_host)) for count in counts]
    rates = [rate / 1e9 for rate in BANDWIDTHS]
    first, second = folder / "speed-by-bandwidth.png", folder / "speed-by-ranks.png"
    _picture(first, rates, by_rate, "bandwidth between hosts in Gbit/s", f"{cluster.ranks} ranks", crossed=True)
    _picture(second, counts, by_ranks, "ranks", f"{8 * link.bandwidth / 1e9:g} Gbit/s between hosts")
    return [first, second]


def _picture(
    path: Path, x: Sequence[float], found: Sequence[Prediction], label: str, title: str, crossed: bool = False
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    for i, spec in enumerate(chosen(found)):
        speeds = [each[NONE].seconds / each[spec].seconds for each in found]
        colour = "black" if spec == STOCK else "grey" if spec in ALWAYS else f"C{i}"
        axes.plot(x, speeds, color=colour, linestyle="--" if spec in ALWAYS else "-", label=spec)
        if crossed and spec not in ALWAYS:
            _mark(axes, x, found, spec, colour)
    axes.set(xscale="log", ylim=(0, 1.05), xlabel=label, ylabel="speed, 1 = no communication at all", title=title)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(which="both", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _mark(axes: Any, x: Sequence[float], found: Sequence[Prediction], spec: str, colour: str) -> None:
    """Mark where a spec and the better of stock and bf16 are equally fast."""
    ahead = [min(each[name].seconds for name in ALWAYS[1:]) / each[spec].seconds for each in found]
    for at in crossovers(x, ahead):
        near = min(range(len(x)), key=lambda i: abs(x[i] - at))
        axes.plot(at, found[near][NONE].seconds / found[near][spec].seconds, "o", color=colour, fillstyle="none")


def chosen(found: Sequence[Prediction]) -> list[str]:
    """Choose the ways that are drawn: those that are always, and those that come nearest to no communication somewhere."""
    every = [line.spec for line in found[0].lines if line.spec not in ALWAYS]
    best = sorted(every, key=lambda spec: min(each[spec].seconds / each[NONE].seconds for each in found))
    fastest = [min((each[spec].seconds, spec) for spec in every)[1] for each in found] if every else []
    return [STOCK, "bf16", *list(dict.fromkeys([*fastest, *best]))[:MOST_LINES]]
