"""The bytes of `lab traffic`: launches the ranks, splits their bytes by origin, and simulates many more."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from laboratory import ranks
from laboratory.report.tables import columns
from laboratory.traffic import formula

# The rate of the emulated links. The bytes do not depend on it.
RATE = "10gbit"

# Bytes of Ethernet, IP and TCP in a packet of up to 64 KB, as the interface counts it. A packet on a real link holds 1,448
# bytes beside its headers, which are then 4.4 % of the total.
HEADERS = 66

# Seconds of a cycle of Horovod, in which its ranks compare their ready operations, also when there are none. Horovod's default
# is 1 ms; the number of cycles in a step then depends on the machine. With 50 ms, every operation waits for the next cycle, so
# a step has as many cycles as operations, hollow or not.
CYCLE = 0.05

# Relative difference between measurement and formula, at most.
TOLERANCE = 0.1

# Entries of all simulated ranks together, at 4 or 8 bytes each.
MOST_ENTRIES = 1 << 29


def launch(chosen: argparse.Namespace, hosts: int) -> dict[str, Any]:
    """Run the ranks, and summarise their bytes."""
    job = ["laboratory.traffic.job", "--size", str(chosen.size), "--steps", str(chosen.steps), *chosen.specs]
    variables = ranks.environment(hosts, HOROVOD_CYCLE_TIME=str(1000 * CYCLE))
    return summary(ranks.run(ranks.command("cluster", hosts, job, RATE), variables, f"{hosts} ranks"))


def summary(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a line for each spec, and a rank's bytes in an idle cycle of Horovod."""
    idle = statistics.mean(CYCLE * each["wire"] / each["seconds"] for each in raw["idle"])
    lines = [line(spec, each) for spec, each in raw["specs"].items()]
    return {"ranks": len(raw["idle"]), "idle_bytes_per_cycle": round(idle), "lines": lines}


def line(spec: str, measured: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Return means over the ranks, per step. Ratio and verdict are of the compressor's own bytes."""
    split = [by_origin(rank["full"], rank["hollow"]) for rank in measured]
    mean = {name: statistics.mean(own[name] for own in split) for name in split[0]}
    furthest = max(((own["payload"] - own["formula"]) / (own["formula"] or mean["formula"]) for own in split), key=abs)
    return {
        "spec": spec,
        "operations": measured[0]["full"]["operations"],
        "messages": statistics.mean(rank["full"]["messages"] for rank in measured),
        **{name: round(value, 1) for name, value in mean.items()},
        "ratio": mean["payload"] / mean["formula"],
        "furthest": furthest,
        "within": abs(furthest) <= TOLERANCE,
        "of_ranks": {name: [round(own[name], 1) for own in split] for name in split[0]},
    }


def by_origin(full: Mapping[str, float], hollow: Mapping[str, float]) -> dict[str, float]:
    """Split the bytes of a rank's interface in a step: headers, those of a hollow step, and the compressor's own.

    beside: gloo's preambles of every message, and the negotiation of Horovod's ranks.
    """
    headers = HEADERS * full["packets"]
    beside = hollow["wire"] - HEADERS * hollow["packets"] - hollow["bytes"] + full["framing"] - hollow["framing"]
    own = full["wire"] - headers - beside
    return {"wire": full["wire"], "headers": headers, "beside": beside, "payload": own, "formula": full["bytes"]}


def table(run: Mapping[str, Any]) -> str:
    """Write a launch's table."""
    rows = [("", "messages", "on the wire", "headers", "beside", "payload", "formula", "ratio", "furthest", "within 10 %")]
    for each in run["lines"]:
        sizes = [f"{each[name]:,.0f}" for name in ("messages", "wire", "headers", "beside", "payload", "formula")]
        rows.append(
            (each["spec"], *sizes, f"{each['ratio']:.3f}", f"{each['furthest']:+.1%}", "yes" if each["within"] else "NO")
        )
    return columns(rows)


def curves(chosen: argparse.Namespace, progress: Callable[[str], object]) -> dict[str, list[dict[str, Any]]]:
    """Count for each spec what simulated ranks send in a step: 2 of them, 4, and so on, as many as fit into memory."""
    found: dict[str, list[dict[str, Any]]] = {spec: [] for spec in chosen.specs}
    for spec, points in found.items():
        count = 2
        while count <= chosen.ranks and count * chosen.size <= MOST_ENTRIES:
            progress(f"simulating {count} ranks: {spec}")
            points.append(point(formula.simulate(spec, formula.model(chosen.size), count)))
            count *= 2
    return found


def point(counted: Sequence[formula.Counting]) -> dict[str, Any]:
    """Return what the rank that sends most sends, and the mean."""
    sent = [own.sent for own in counted]
    return {
        "ranks": len(sent),
        "operations": dict(counted[0].operations),
        "bytes": {"most": max(own.bytes for own in sent), "mean": statistics.mean(own.bytes for own in sent)},
        "messages": {"most": max(own.messages for own in sent), "mean": statistics.mean(own.messages for own in sent)},
        "framing": {"most": max(own.framing for own in sent), "mean": statistics.mean(own.framing for own in sent)},
    }
