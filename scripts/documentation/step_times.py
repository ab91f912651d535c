"""The tables of benchmarks/step-times.md, from the records: steps on clusters, and under FSDP2.

PYTHONPATH=scripts python -m documentation.step_times    writes them anew
"""

from __future__ import annotations

from typing import Any

from laboratory.commands.steps import DOORS, HOSTS, LINKS, cluster, launched
from laboratory.machine import ROOT
from laboratory.report import filled, markdown, read

PAGE = ROOT / "benchmarks" / "step-times.md"
FSDP2 = {"fsdp": "shards", "hsdp": "replicas of two shards", "replicate": "replicas"}
TASKS = {"cifar-large": "CIFAR, SGD", "shakespeare": "text, AdamW"}


def steps(task: str, door: str) -> str:
    """Write the milliseconds of a step: a row for each way, a column for each cluster."""
    every = {place: record["lines"] for place, record in launched(task, door).items()}
    places = [(hosts, rate) for hosts in HOSTS for rate in LINKS if (hosts, rate) in every]
    ways = list(dict.fromkeys(line["way"] for place in places for line in every[place]))
    rows = [["ms a step", *(cluster(*place) for place in places)]]
    for way in ways:
        ms = [next((line["ms"]["median"] for line in every[place] if line["way"] == way), None) for place in places]
        rows.append([f"`{way}`", *("" if each is None else f"{each:,.0f}" for each in ms)])
    return markdown(rows)


def fsdp2(door: str) -> str:
    """Write a row for each way: its gradients' bytes on a host's interface, and the milliseconds of a step on each link."""
    runs = read(ROOT / "benchmarks" / "results" / f"train-blocks-{door}.json")["runs"]
    rivals = [rival for rival in ("stock", "bf16", "alltoall") if rival in runs[0]["ways"]]
    over = f"over {', '.join(f'`{rival}`' for rival in rivals)}"
    rows = [["way", "bytes an entry", *(cell for run in runs for cell in (f"ms, {cluster(run['hosts'], run['rate'])}", over))]]
    for at, first in enumerate(runs[0]["lines"]):
        row = [f"`{first['way']}`", f"{gradient_bytes(runs[0], first['way']):.2f}"]
        for run in runs:
            line = run["lines"][at]
            own = [line["over"].get(rival) for rival in rivals]
            ratios = ["-" if each is None else f"{each['median']:.2f} ({each['at_most']:.2f})" for each in own]
            row += [f"{line['ms']['median']:,.0f}", ", ".join(ratios)]
        rows.append(row)
    return markdown(rows)


def gradient_bytes(run: Any, way: str) -> float:
    """Return the bytes that a host's interface sends for each entry of the gradients: the parameters' are in `none`."""
    none, own = (next(line for line in run["lines"] if line["way"] == each) for each in ("none", way))
    sent: float = own["interface_bytes_per_step"] - none["interface_bytes_per_step"]
    return sent / int(run["parameters"])


def written(page: str) -> str:
    """Return the page with the tables of the records."""
    tables = {f"{about}, {called}": steps(task, door) for task, about in TASKS.items() for door, called in DOORS.items()}
    tables |= {f"FSDP2, {about}": fsdp2(door) for door, about in FSDP2.items()}
    for place, table in tables.items():
        page = filled(PAGE, page, place, table)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
