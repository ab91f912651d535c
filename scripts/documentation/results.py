"""The charts and tables of docs/results.md, from the records.

PYTHONPATH=scripts python -m documentation.results    makes them anew
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from documentation import step_times
from documentation.charts import Bar, Bounded, Sheet, bars, bounds
from laboratory.commands.steps import DOORS, launched
from laboratory.machine import ROOT
from laboratory.report import filled, read
from laboratory.stats import upper_bound
from laboratory.tasks.table import PERPLEXITY

PAGE, CHARTS, RESULTS = ROOT / "docs" / "results.md", ROOT / "docs" / "charts", ROOT / "benchmarks" / "results"
HOSTS = 4
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
CLUSTERS = {
    "cifar-large": "CIFAR-10, net of 2.8 M parameters, SGD",
    "shakespeare": "Text, transformer of 1.3 M parameters, AdamW",
}

# The rows of a chart, each with the ways of DDP and of Horovod. Those of gradcomp have one name.
ROWS: Mapping[str, tuple[str, str]] = {
    "no exchange": ("none", "none"),
    "stock": ("stock", "stock"),
    "bf16 | fp16": ("bf16", "fp16"),
    "bf16, 4 batches": ("bf16:steps=4", ""),
    "PowerSGD 4 | DGC": ("powersgd:rank=4", "dgc:ratio=0.01"),
    "topk": ("topk", "topk"),
    "orq, 9 levels": ("orq:levels=9,momentum=0",) * 2,
    "auto": ("auto", "auto"),
}

# The trainings whose steps are set beside step times, by task: the records, and for each row the spec that trained, and the way
# of DDP's and of Horovod's steps.
RACES: Mapping[str, tuple[tuple[str, ...], Mapping[str, tuple[str, str, str]]]] = {
    "cifar-large": (
        ("study-cifar-large",),
        {
            "stock": ("dense", "stock", "stock"),
            "bf16": ("bf16", "bf16", ""),
            "topk": ("topk:ratio=0.01", "topk", "topk"),
            "sdagc": ("sdagc:density=0.01", "sdagc", "sdagc"),
        },
    ),
    "shakespeare": (
        ("study-shakespeare-rest", "study-shakespeare"),
        {
            "stock": ("dense", "stock", "stock"),
            "bf16": ("bf16", "bf16", ""),
            "topk": ("topk:ratio=0.01", "topk", "topk"),
            "sdagc": ("sdagc", "sdagc", "sdagc"),
            "orq, 9 levels": ("orq:levels=9", *ROWS["orq, 9 levels"]),
        },
    ),
}

# The records of several learning rates, of which each way has its best: of the pictures, of peers there, and of the long text.
OF_PICTURES = tuple(f"study-cifar-rate-{rate}" for rate in ("05", "1", "2", "4"))
OF_PEERS = ("study-cifar-peers", *(f"study-cifar-peers-rate-{rate}" for rate in ("05", "2", "4")))
OF_TEXT = tuple(f"study-text-converged-{rate}" for rate in ("4e3", "8e3", "16e3", "32e3"))

# The trainings of a chart of scores: a heading, the record or those of several learning rates, whether differences are a share
# of the score, and the specs.
STUDIES: list[tuple[str, tuple[str, ...], bool, Mapping[str, str]]] = [
    (
        "CIFAR-10, SGD, 12 seeds: points below dense's {:.1f} %",
        ("study-cifar-best",),
        False,
        {
            "orq": "orq",
            "bingrad": "bingrad",
            "topk 2 %": "topk:ratio=0.02",
            "topk": "topk:ratio=0.01",
            "sdagc": "sdagc:density=0.01",
        },
    ),
    (
        "The same, 3 seeds: points below dense's {:.1f} %",
        ("study-cifar",),
        False,
        {
            "sdagc 0.42 %": "sdagc:density=0.0042",
            "topk 0.46 %": "topk:ratio=0.0046",
            "topk 0.18 %": "topk:ratio=0.0018",
            "sdagc 0.16 %": "sdagc:density=0.0016",
        },
    ),
    (
        "Best of 4 rates, 3 seeds: points below dense's {:.1f} %",
        OF_PICTURES,
        False,
        {"blocks": "blocks", "orq": "orq", "sdagc": "sdagc:density=0.01", "topk": "topk:ratio=0.01"},
    ),
    (
        "Peers on real ranks, 3 seeds: points below DDP's {:.1f} %",
        OF_PEERS,
        False,
        {
            "bf16": "bf16",
            "PowerSGD 8": "powersgd:rank=8,start=80",
            "PowerSGD 4": "powersgd:rank=4,start=80",
            "PowerSGD 2": "powersgd:rank=2,start=80",
            "bf16, 4 batches": "bf16:steps=4",
            "PowerSGD 1": "powersgd:rank=1,start=80",
        },
    ),
    (
        "CIFAR-10, 30 epochs, 3 seeds: points below dense's {:.1f} %",
        ("study-cifar-converged",),
        False,
        {
            "sdagc 0.42 %": "sdagc:density=0.0042",
            "topk": "topk:ratio=0.01",
            "orq": "orq",
            "PowerSGD 4": "powersgd:rank=4,start=234",
            "blocks": "blocks",
        },
    ),
    (
        "The same training",
        ("study-cifar-converged-rest",),
        False,
        {"topk 0.46 %": "topk:ratio=0.0046", "topk, warm-up": "topk:ratio=0.0046,warmup=312"},
    ),
    (
        "Text, best of 4 rates, 3 seeds: % above dense's {:.2f}",
        OF_TEXT,
        True,
        {"sdagc 0.42 %": "sdagc:density=0.0042", "topk": "topk:ratio=0.01", "orq": "orq", "blocks": "blocks"},
    ),
    (
        "Text, larger, 500 steps, 3 seeds: % above dense's {:.2f}",
        ("study-shakespeare-best-rate",),
        True,
        {"topk": "topk:ratio=0.01", "sdagc": "sdagc", "orq": "orq"},
    ),
    ("The same, 5 seeds", ("study-blocks-text-best-rate",), True, {"blocks, 5 seeds": "blocks"}),
    (
        "The same, 250 steps, rate 0.001: % above dense's {:.2f}",
        ("study-shakespeare-rest",),
        True,
        {"bf16": "bf16", "orq, 9 levels": "orq:levels=9", "orq": "orq", "bingrad": "bingrad"},
    ),
]


def scores() -> str:
    """Draw what each spec loses, by its ratio of bytes. Records of one training share a part of the chart."""
    sheet = Sheet("Scores beside dense's, by the ratio of bytes")
    parts: list[tuple[str, bool, list[Bounded]]] = []
    for heading, names, share, specs in STUDIES:
        lines = best(names)
        base = base_of(lines)["score"]
        rows = [bounded(label, lines[spec], 100 / base if share else 1) for label, spec in specs.items()]
        if "{" in heading:
            parts.append((heading.format(base), share, rows))
        else:
            parts[-1][2].extend(rows)
    for heading, share, rows in parts:
        sheet.heading(heading)
        bounds(sheet, rows, "{:.1f}" if share else "{:.2f}")
    return sheet.svg()


def best(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a study's lines by their spec; of records with other learning rates, the one with its least training loss.

    They are compared with dense, or with stock where real ranks trained it.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        (task,) = read(RESULTS / f"{name}.json")["tasks"].values()
        for line in task["lines"]:
            known = found.get(line["spec"])
            if known is None or line["losses"][-1] < known["losses"][-1]:
                found[line["spec"]] = {**line, "rate": task["settings"]["lr"]}
    sign = 1 if task["score"] == PERPLEXITY[0] else -1
    for line in found.values():
        worse = [sign * (a - b) for a, b in zip(line["scores"], base_of(found)["scores"], strict=True)]
        line |= {"worse_than_dense": fmean(worse), "worse_at_most": upper_bound(worse)}
    return found


def base_of(lines: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the line that others are compared with."""
    return lines.get("stock", lines["dense"])


def bounded(label: str, line: Mapping[str, Any], factor: float) -> Bounded:
    """Return a spec's row."""
    ours = not line["spec"].startswith(("bf16", "powersgd"))
    return Bounded(label, line["compression"], line["worse_than_dense"] * factor, line["worse_at_most"] * factor, ours)


def steps() -> str:
    """Draw the milliseconds of a step."""
    sheet = Sheet("Milliseconds of a step, by link, under DDP and under Horovod")
    for task, about in CLUSTERS.items():
        every = {door: launched(task, door) for door in DOORS}
        sheet.heading(f"{about}: ms a step")
        for rate, link in LINKS.items():
            lines = {door: {line["way"]: line for line in of[HOSTS, rate]["lines"]} for door, of in every.items()}
            rows = []
            for name, ways in ROWS.items():
                found = [lines[door].get(way) for door, way in zip(DOORS, ways, strict=True)]
                rows.append((name, [taken(line) for line in found]))
            block(sheet, link, rows)
    return sheet.svg()


def taken(line: Mapping[str, Any] | None) -> Bar:
    """Return a way's milliseconds."""
    return Bar(line["ms"]["median"], f"{line['ms']['median']:,.0f}") if line else Bar(None, "")


def seconds() -> str:
    """Draw the seconds until the loss of a training is down at dense's, from its steps over the seeds and a step's time."""
    sheet = Sheet("Seconds until a training's loss is down at dense's, by link, under DDP and under Horovod")
    for task, (records, racers) in RACES.items():
        by_spec = {line["spec"]: line for name in records for line in read(RESULTS / f"{name}.json")["tasks"][task]["lines"]}
        every = {door: launched(task, door) for door in DOORS}
        sheet.heading(f"{CLUSTERS[task]}: s until the loss is dense's")
        for rate, link in LINKS.items():
            ms = {door: {line["way"]: line["ms"]["median"] for line in of[HOSTS, rate]["lines"]} for door, of in every.items()}
            rows = [
                (name, [needed(by_spec[spec], ms[door].get(way)) for door, way in zip(DOORS, ways, strict=True)])
                for name, (spec, *ways) in racers.items()
            ]
            block(sheet, link, rows, words=66)
    return sheet.svg()


def needed(line: Mapping[str, Any], ms: float | None) -> Bar:
    """Return the seconds that a way's steps take, and their bound over the seeds."""
    if ms is None:
        return Bar(None, "")
    found = line["steps_to_loss"] * ms / 1000
    if line["spec"] == "dense":
        return Bar(found, f"{found:,.0f}")
    most = found * line["times_at_most"] / line["times_the_steps"]
    return Bar(found, f"{found:,.0f} (\N{LESS-THAN OR EQUAL TO} {most:,.0f})")


def block(sheet: Sheet, link: str, rows: list[tuple[str, list[Bar]]], words: float = 48) -> None:
    """Draw the rows of one link, which share a scale. words: their room beside a bar."""
    sheet.height += 6
    sheet.text(8, f"{HOSTS} hosts, {link}", "muted")
    for at, door in enumerate(DOORS.values()):
        sheet.text(112 + at * 140, door, "muted")
    sheet.height += 16
    ours = ("topk", "sdagc", "orq, 9 levels", "auto")
    bars(sheet, [(name, name in ours, columns) for name, columns in rows], words)


def charts() -> Iterator[tuple[str, str]]:
    """List the charts: the name of a file, and its text."""
    yield from {"scores": scores(), "steps": steps(), "seconds": seconds()}.items()


# The kernels of the page, and what it calls them.
KERNELS = {
    "accumulate, take_topk": "accumulate and exact top-k of 0.1 %",
    "torch add_, top-k, gather, fill": "the same in plain torch",
    "accumulate, moments, take_above": "accumulate, moments, entries beyond 3.3 deviations",
    "ORQ-3, round and add": "ORQ-3: levels, words, and these decoded and added",
}


def kernels() -> list[list[str]]:
    """Write a row for each kernel."""
    lines = {line["name"]: line for line in read(RESULTS / "kernels-cpu-amd-epyc.json")["lines"]}
    rows = [["", "x the time of `add_`", "share of copy bandwidth"]]
    for name, called in KERNELS.items():
        times, share = (lines[name][key] for key in ("ratio_to_add", "share_of_copy"))
        rows.append([called, f"{times['median']:.1f}", f"{100 * share:.0f} %" if share else ""])
    return rows


def fsdp2() -> list[list[str]]:
    """Write a row for each way under FSDP2: its bytes, and its step over that of an all-to-all."""
    runs = read(RESULTS / "train-blocks-fsdp.json")["runs"]
    rows = [["way", "bytes an entry", *(f"over `alltoall`, {LINKS[run['rate']]}" for run in runs)]]
    for at, first in enumerate(runs[0]["lines"]):
        over = [run["lines"][at]["over"].get("alltoall") for run in runs]
        cells = ["" if of is None else f"{of['median']:.2f} ({of['at_most']:.2f})" for of in over]
        rows.append([f"`{first['way']}`", f"{step_times.gradient_bytes(runs[0], first['way']):.1f}", *cells])
    return rows


def written(page: str) -> str:
    """Return the page with the tables of the records."""
    for place, rows in {"FSDP2": fsdp2(), "kernels": kernels()}.items():
        page = filled(PAGE, page, place, rows)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    CHARTS.mkdir(exist_ok=True)
    for name, text in charts():
        (CHARTS / f"{name}.svg").write_text(text)
