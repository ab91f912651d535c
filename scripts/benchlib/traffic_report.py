"""`bench.py traffic` on the near side: launches the ranks, takes apart what they sent, simulates many more, draws both."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchlib import ranks, report, traffic
from benchlib.machine import ROOT

RATE = "10gbit"
"""Of the emulated links: how much is sent does not hang on it."""
HEADERS = 66
"""Bytes of Ethernet, IP and TCP in a packet as the interface counts it: up to 64 KB at once. A real link's packets hold 1,448
bytes beside their headers, which are 4.4 % of what is on it then."""
CYCLE = 0.05
"""Seconds from one time that Horovod's ranks compare what is ready to the next; they do so also when nothing is. By default
it is a thousandth, and how often they do so in a step hangs on the machine. In so long a cycle every operation waits for the
next one, and a step has as many cycles as operations, hollow or not."""
ROOM = 0.1
"""How far what was measured may be from the formula."""
MOST = 1 << 29
"""Entries of all ranks together that are simulated, at 4 bytes each, or 8."""


def launch(chosen: argparse.Namespace, hosts: int) -> dict[str, Any]:
    """Runs the ranks, and sums up what they measured."""
    job = [sys.executable, str(ROOT / "scripts" / "traffic_job.py"), "--size", str(chosen.size), "--steps", str(chosen.steps)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HOROVOD_CYCLE_TIME": str(1000 * CYCLE)}
    return summary(ranks.run(ranks.on_cluster(hosts, RATE, [*job, *chosen.specs]), environment, "cluster", f"{hosts} ranks"))


def summary(raw: dict[str, Any]) -> dict[str, Any]:
    """A line for each spec, and what a rank sends in a cycle of Horovod's in which nobody asks for anything."""
    idle = statistics.mean(CYCLE * each["wire"] / each["seconds"] for each in raw["idle"])
    lines = [line(spec, each) for spec, each in raw["specs"].items()]
    return {"ranks": len(raw["idle"]), "idle_bytes_per_cycle": round(idle), "lines": lines}


def line(spec: str, measured: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Means over the ranks, per step; ratio and verdict are of the compressor's own bytes."""
    parts = [apart(rank["full"], rank["hollow"]) for rank in measured]
    mean = {name: statistics.mean(part[name] for part in parts) for name in parts[0]}
    furthest = max(((part["payload"] - part["formula"]) / (part["formula"] or mean["formula"]) for part in parts), key=abs)
    return {
        "spec": spec,
        "operations": measured[0]["full"]["operations"],
        "messages": statistics.mean(rank["full"]["messages"] for rank in measured),
        **{name: round(value, 1) for name, value in mean.items()},
        "ratio": mean["payload"] / mean["formula"],
        "furthest": furthest,
        "within": abs(furthest) <= ROOM,
        "of_ranks": {name: [round(part[name], 1) for part in parts] for name in parts[0]},
    }


def apart(full: Mapping[str, float], hollow: Mapping[str, float]) -> dict[str, float]:
    """What went over a rank's interface in a step: headers, what a hollow step sends too, and the compressor's own.

    beside: gloo's words around every message, and what Horovod's ranks tell one another.
    """
    headers = HEADERS * full["packets"]
    beside = hollow["wire"] - HEADERS * hollow["packets"] - hollow["bytes"] + full["framing"] - hollow["framing"]
    own = full["wire"] - headers - beside
    return {"wire": full["wire"], "headers": headers, "beside": beside, "payload": own, "formula": full["bytes"]}


def table(run: Mapping[str, Any]) -> str:
    rows = [("", "messages", "on the wire", "headers", "beside", "payload", "formula", "ratio", "furthest", "within 10 %")]
    for each in run["lines"]:
        sizes = [f"{each[name]:,.0f}" for name in ("messages", "wire", "headers", "beside", "payload", "formula")]
        rows.append(
            (each["spec"], *sizes, f"{each['ratio']:.3f}", f"{each['furthest']:+.1%}", "yes" if each["within"] else "NO")
        )
    return report.table(rows)


def curves(chosen: argparse.Namespace, progress: Callable[[str], object]) -> dict[str, list[dict[str, Any]]]:
    """For each spec what simulated ranks send in a step: 2 of them, 4, and so on, as many as there is memory for."""
    found: dict[str, list[dict[str, Any]]] = {spec: [] for spec in chosen.specs}
    for spec, points in found.items():
        count = 2
        while count <= chosen.ranks and count * chosen.size <= MOST:
            progress(f"simulating {count} ranks: {spec}")
            points.append(point(traffic.simulate(spec, traffic.model(chosen.size), count)))
            count *= 2
    return found


def point(counted: Sequence[traffic.Counting]) -> dict[str, Any]:
    """A number of ranks: what the busiest of them sends, and the mean."""
    sent = [own.sent for own in counted]
    return {
        "ranks": len(sent),
        "operations": dict(counted[0].operations),
        "bytes": {"most": max(own.bytes for own in sent), "mean": statistics.mean(own.bytes for own in sent)},
        "messages": {"most": max(own.messages for own in sent), "mean": statistics.mean(own.messages for own in sent)},
        "framing": {"most": max(own.framing for own in sent), "mean": statistics.mean(own.framing for own in sent)},
    }


def draw(
    size: int, runs: Sequence[Mapping[str, Any]], simulated: Mapping[str, Sequence[Mapping[str, Any]]], path: Path
) -> None:
    """Against the number of ranks: bytes of the busiest one and of the mean one, and messages."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 6.4), layout="constrained")
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
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("ranks")
        axes.grid(which="both", alpha=0.25)
    figure.suptitle(f"What the busiest rank (dotted: the mean one) sends for {size:,} entries, without headers and preambles")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
