"""The charts of pages, made from records or by a law. PYTHONPATH=scripts python -m documentation.pictures draws them anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from documentation.charts import MARGIN, NAME, ROW, WIDTH, Bar, Bounded, Curve, Sheet, bars, bounds, curves
from documentation.tables import DOCS, SCALED, Line, base_of, best, by_hosts, lines_of, local_trainings, way_of
from laboratory.commands.steps import DOORS, launched
from laboratory.timing import upper_bound

CHARTS = DOCS / "charts"
HOSTS = 4
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
CLUSTERS = {
    "cifar-large": "CIFAR-10, net of 2.8 M parameters, SGD",
    "shakespeare": "Text, transformer of 1.3 M parameters, AdamW",
}
# What charts call ways that are not called by their specs.
CALLED = {"topk:ratio=0.01": "topk", "sdagc:density=0.01": "sdagc", "bf16:steps=4": "bf16, 4 batches"}
CALLED |= {"orq:levels=9": "orq, 9 levels", "orq:levels=9,momentum=0": "orq, 9 levels", "orq:levels=5": "orq, 5 levels"}
CALLED |= {"bingrad:form=pb": "bingrad, pb"}
CALLED |= {"powersgd:rank=4": "PowerSGD 4", "powersgd:rank=1": "PowerSGD 1"}
CALLED |= {"weights:bits=8": "8 bits", "mixed-bf16": "bf16"}
CALLED |= {f"topk:ratio={ratio}": f"topk {100 * ratio:.2g} %" for ratio in (0.1, 0.0046, 0.001)}
CALLED |= {f"sdagc:density={ratio}": f"sdagc {100 * ratio:.2g} %" for ratio in (0.0042,)}
CALLED |= {f"powersgd:rank={rank},start={start}": f"PowerSGD {rank}" for rank in (1, 2, 4, 8) for start in (80, 234)}

# The rows of a chart of step times, each with the ways of DDP and of Horovod. Those of gradcomp have one name.
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

# The trainings of a chart of scores: a heading, the record or those of several learning rates, of which each way has its best,
# and the specs, separated by semicolons. A heading without a figure goes on with the part before. In percent, differences are
# a share of the score.
ADVISED = "powersgd:rank={},start=80"
STUDIES: list[tuple[str, Sequence[str], str]] = [
    (
        "CIFAR-10, SGD, 30 epochs, 3 seeds: points below dense's {:.1f} %",
        ["cifar-present-ratios"],
        "topk:ratio=0.1;sdagc:density=0.0042;topk:ratio=0.0046;topk:ratio=0.001",
    ),
    ("The same training", ["cifar-present"], "topk:ratio=0.01;orq"),
    ("The same training", ["cifar-present-rest"], "blocks;lgc;bingrad:form=pb"),
    ("The same training", ["cifar-converged"], "powersgd:rank=4,start=234"),
    (
        "The same, 800 steps, 5 seeds: points below dense's {:.1f} %",
        ["cifar-queue"],
        "topk:ratio=0.1;topk:ratio=0.01;sdagc:density=0.01;topk:ratio=0.0046",
    ),
    ("The same training", ["cifar-quantisers-present"], "half;blocks;orq;orq:levels=5;terngrad;bingrad;lgc"),
    (
        "800 steps on real ranks, 3 seeds: points below DDP's {:.1f} %",
        ["cifar-peers", *(f"cifar-peers-rate-{rate}" for rate in ("05", "2", "4"))],
        ";".join(["bf16", *(ADVISED.format(rank) for rank in (8, 4, 2)), "bf16:steps=4", ADVISED.format(1)]),
    ),
    (
        "Text, AdamW, better of 2 rates, 3 seeds: % above dense's {:.2f}",
        ["text-present-8e3", "text-present-16e3"],
        "topk:ratio=0.01;orq;blocks",
    ),
    ("LoRA, AdamW, 5 seeds: % above dense's {:.2f}", ["adapters"], "topk:ratio=0.1;topk:ratio=0.01;orq;blocks"),
    (
        "Fine-tuning, AdamW, 5 seeds: points below dense's {:.1f} %",
        ["pitch-present-5e-4", "pitch-present-1e-3"],
        "topk:ratio=0.01;orq;blocks",
    ),
]


def scores() -> str:
    """Draw what each spec loses, by its ratio of bytes. Records of one training share a part of the chart."""
    sheet, parts = Sheet("Scores beside dense's, by the ratio of bytes"), list[tuple[str, list[Bounded]]]()
    for heading, names, specs in STUDIES:
        lines, seeds = best(names), heading.partition(", ")[2]
        base = base_of(lines)["score"]
        if "{" in heading:
            parts.append((heading.format(base), []))
        title, rows = parts[-1]
        for spec in specs.split(";"):
            name = CALLED.get(spec, spec) + (f", {seeds}" if seeds and "{" not in heading else "")
            rows.append(bounded(name, lines[spec], 100 / base if "% above" in title else 1))
    for title, rows in parts:
        sheet.heading(title)
        bounds(sheet, rows, "{:.1f}" if "% above" in title else "{:.2f}")
    return sheet.svg()


def bounded(label: str, line: Line, factor: float) -> Bounded:
    """Return a spec's row."""
    ours = not line["spec"].startswith(("bf16", "powersgd"))
    return Bounded(label, line["compression"], line["worse_than_dense"] * factor, line["worse_at_most"] * factor, ours)


def steps() -> str:
    """Draw the milliseconds of a step. The rows of a link share a scale."""
    sheet = Sheet("Milliseconds of a step, by link, under DDP and under Horovod")
    for task, about in CLUSTERS.items():
        sheet.heading(f"{about}: ms per step")
        every = {door: launched(task, door) for door in DOORS}
        for rate, link in LINKS.items():
            ms = [{line["way"]: line["ms"]["median"] for line in every[door][HOSTS, rate]["lines"]} for door in DOORS]
            sheet.height += 6
            sheet.text(8, f"{HOSTS} hosts, {link}", "muted")
            for at, door in enumerate(DOORS.values()):
                sheet.text(112 + at * 140, door, "muted")
            sheet.height += 16
            drawn = []
            for name, ways in ROWS.items():
                found = [Bar(of.get(way), f"{of[way]:,.0f}" if way in of else "") for of, way in zip(ms, ways, strict=True)]
                drawn.append((name, name in ("topk", "orq, 9 levels", "auto"), found))
            bars(sheet, drawn, 48)
    return sheet.svg()


def local_steps() -> str:
    """Draw how much worse than DDP local steps end: of text by replicas and way, beside the law, and of images by way."""
    sheet, parts = Sheet("What local steps lose"), dict[str, list[Bounded]]()
    for each in local_trainings():
        if (way := each.way) is None:
            continue
        about = f"{each.text}, {each.parameters / 1e6:.2f} M, {each.optimizer}: loss above DDP's, %"
        rows, ratio = parts.setdefault(about, []), each.line["compression"]
        name = f"{each.ranks}: {way.spec.partition(':')[0]}, {way.every}"
        over, seeds = fmean(each.over), len(each.over)
        rows.append(Bounded(name, ratio, over, upper_bound(each.over) if seeds > 1 else over, True))
        if each.law is not None:
            rows.append(Bounded(f"{each.ranks}: the law", ratio, each.law, each.law, False))
    ddp, *others = lines_of("local-cifar")
    images = parts.setdefault(f"CIFAR-10, 4 replicas: points below DDP's {ddp['score']:.1f} %", [])
    for line in others:
        by, way = [base - own for own, base in zip(line["scores"], ddp["scores"], strict=True)], way_of(line)
        images.append(Bounded(f"every {way.every}, {way.spec}", line["compression"], fmean(by), upper_bound(by), True))
    for heading, rows in parts.items():
        sheet.heading(heading)
        bounds(sheet, rows, "{:.1f}")
    return sheet.svg()


def scale() -> str:
    """Draw the bytes at a host's interface, by the number of hosts."""
    sheet, lines = Sheet("Megabytes at a host's interface in a step, as hosts are added"), by_hosts()
    hosts = sorted(lines["stock"])
    sheet.heading("Megabytes at a host's interface in a step, by hosts")
    theirs = ("stock", "bf16", "powersgd:rank=4")
    drawn = [
        Curve(name, spec not in theirs, [lines[spec][n]["interface_bytes"] / 1e6 for n in hosts])
        for spec, name in SCALED.items()
    ]
    curves(sheet, drawn, [f"{n:,}" for n in hosts], 220)
    return sheet.svg()


def links(record: Mapping[str, Any]) -> str:
    """Draw gpu_check's milliseconds of a step between ranks that share a GPU, by link: a stage's record."""
    sheet, rates = Sheet("Milliseconds of a GPT's step, by link"), list(dict.fromkeys(line["rate"] for line in record["lines"]))
    sheet.heading("Milliseconds of a GPT's step, by link")
    sheet.text(MARGIN, record["title"], "muted")
    for rate in rates:
        sheet.height += ROW + 6
        sheet.text(MARGIN, "no limit" if rate == "none" else LINKS.get(rate, rate), "muted")
        sheet.height += ROW
        rows = list[tuple[str, bool, Sequence[Bar]]]()
        for line in record["lines"]:
            if line["rate"] == rate and "ms" in line:
                name, (low, high) = CALLED.get(line["way"], line["way"]), line["ms_bounds"]
                ms = line["ms"]["median"]
                label = f"{line['door'].upper()} {name}" if name == "stock" or line["door"] != "ddp" else name
                ours = not name.startswith(("stock", "bf16", "mixed", "PowerSGD", "powersgd"))
                words = f"{ms:,.0f}" if low is None or high is None else f"{ms:,.0f} ({low:,.0f} to {high:,.0f})"
                rows.append((label, ours, [Bar(ms, words)]))
        bars(sheet, rows, 120)
    return sheet.svg()


def queue() -> str:
    """Draw what momentum and a residual have delivered of a gradient, by steps since it came."""
    momentum, most, height, left, right = 0.9, 49, 120, MARGIN + 36, WIDTH - NAME
    sheet = Sheet("What momentum 0.9 and a residual have delivered of a gradient")
    sheet.heading("Delivered of a gradient's effect, by steps since it came")
    sheet.height += 6
    for share in (0.0, 0.5, 1.0):
        sheet.line(left, right, height * (1 - share), kind="grid")
        sheet.text(left - 6, f"{100 * share:.0f} %", "muted", end=True, down=height * (1 - share) - 7)
    rows = (("momentum 0.9", 1), ("sent every 8", 8), ("or 25 steps", 25))
    for at, (name, every) in enumerate(rows):
        ends = [(step, 1 - momentum ** (step - step % every)) for step in range(most + 1)]
        corners = [(step + later, share) for step, share in ends for later in range(min(every, 2))]
        points = " ".join(
            f"{left + (right - left) * min(step / most, 1):.1f},{sheet.height + height * (1 - share):.1f}"
            for step, share in corners
        )
        sheet.parts.append(f'<polyline points="{points}" class="curve {"other" if every == 1 else "ours"}"/>')
        sheet.text(right + 6, name, "" if every == 1 else "bold", down=14 * at - 7)
    sheet.height += height + 4
    for step in range(0, most, 10):
        sheet.text(left + (right - left) * step / most + 8, f"{step}", "muted", end=True)
    sheet.height += ROW
    return sheet.svg()


DRAWN = {"scores": scores, "steps": steps, "local-steps": local_steps, "scale": scale, "queue": queue}


if __name__ == "__main__":
    for name, draw in DRAWN.items():
        (CHARTS / f"{name}.svg").write_text(draw())
