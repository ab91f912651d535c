"""The tables of pages that are made from records. PYTHONPATH=scripts python -m documentation.tables writes them anew."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from laboratory.commands.steps import DOORS, HOSTS, LINKS, cluster, launched
from laboratory.commands.strangers import summary
from laboratory.commands.trainers import table as losses
from laboratory.harness.ways import LocalWay, local_of
from laboratory.machine import ROOT
from laboratory.report import Rows, figure, filled, read
from laboratory.tasks.table import PERPLEXITY
from laboratory.timing import upper_bound

DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
Line = Mapping[str, Any]
LINKS_OF_PAGES = ("100mbit", "1gbit", "10gbit")


def lines_of(name: str) -> list[Any]:
    """Return the lines of a study of one task."""
    (task,) = read(RESULTS / f"study-{name}.json")["tasks"].values()
    found: list[Any] = task["lines"]
    return found


def best(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a study's lines by their spec; of records with other learning rates, the one with its least training loss.

    They are compared with dense, or with stock where real ranks trained it.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        (task,) = read(RESULTS / f"study-{name}.json")["tasks"].values()
        for line in task["lines"]:
            known = found.get(line["spec"])
            if known is None or line["losses"][-1] < known["losses"][-1]:
                found[line["spec"]] = line
    sign = 1 if task["score"] == PERPLEXITY[0] else -1
    for line in found.values():
        worse = [sign * (a - b) for a, b in zip(line["scores"], base_of(found)["scores"], strict=True)]
        line |= {"worse_than_dense": fmean(worse), "worse_at_most": upper_bound(worse)}
    return found


def base_of(lines: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the line that others are compared with."""
    return lines.get("stock", lines["dense"])


# README.md

RIVALS = {
    "none": "compute only",
    "stock": "plain DDP",
    "bf16": "bf16 hook",
    "powersgd:rank=4": "PowerSGD hook, rank 4",
    "bf16:steps=4": "bf16, 4 batches accumulated",
    "blocks": "`blocks`",
    "orq": "`orq`",
    "topk": "`topk`",
}


def readme_steps() -> Rows:
    """Write the milliseconds of a step under DDP, a row for each link."""
    rows = [["link of each host", *RIVALS.values()]]
    for run in read(RESULTS / "train-readme.json")["runs"]:
        ms = {line["way"]: f"{line['ms']['median']:,.0f}" for line in run["lines"]}
        rows.append([cluster(4, run["rate"]).partition(", ")[2], *(ms[way] for way in RIVALS)])
    return rows


# The longest trainings, and fine-tunings: what they are, their records, and the unit of a score. Specs of a later list of
# records take the place of an earlier one's; of the records of a list, each spec has its best learning rate.
LONGEST: list[tuple[str, list[list[str]], str]] = [
    ("CIFAR-10 subset, SGD, 30 epochs: accuracy", [["cifar-present-rest"], ["cifar-present"]], "{:.2f} %"),
    (
        "Shakespeare, AdamW, 3,000 steps, each at the better of two learning rates: perplexity per byte",
        [["text-present-8e3", "text-present-16e3"]],
        "{:.2f}",
    ),
    (
        "CREPE, a pitch detector, fine-tuned, AdamW, each at the better of two learning rates: accuracy",
        [["pitch-present-5e-4", "pitch-present-1e-3"]],
        "{:.2f} %",
    ),
    ("a transformer adapted to another text by LoRA, AdamW: perplexity per byte", [["adapters"]], "{:.2f}"),
]


def longest() -> Rows:
    """Write the scores of the longest trainings. A star: worse with 95 % confidence."""
    rows = [["training, three to five seeds", "uncompressed", "`blocks`", "`orq`", "`topk`"]]
    for about, records, form in LONGEST:
        lines, cells = {spec: line for names in records for spec, line in best(names).items()}, [about]
        for spec in ("dense", "blocks", "orq", "topk:ratio=0.01"):
            line = lines[spec]
            is_worse = 2 * line["worse_than_dense"] > line["worse_at_most"] > 0
            cells.append(form.format(line["score"]) + " *" * is_worse)
        rows.append(cells)
    return rows


# benchmarks/step-times.md


def steps(task: str, door: str) -> Rows:
    """Write the milliseconds of a step: a row for each way, a column for each cluster."""
    every = {place: record["lines"] for place, record in launched(task, door).items()}
    places = [(hosts, rate) for hosts in HOSTS for rate in LINKS if (hosts, rate) in every]
    rows = [["ms per step", *(cluster(*place) for place in places)]]
    for way in dict.fromkeys(line["way"] for place in places for line in every[place]):
        ms = [next((line["ms"]["median"] for line in every[place] if line["way"] == way), None) for place in places]
        rows.append([f"`{way}`", *(figure(each, "{:,.0f}", "") for each in ms)])
    return rows


def fsdp2(door: str) -> Rows:
    """Write a row for each way: its gradients' bytes on a host's interface, and the milliseconds of a step on each link."""
    runs = read(RESULTS / f"train-blocks-{door}.json")["runs"]
    rivals = [rival for rival in ("stock", "bf16", "alltoall") if rival in runs[0]["ways"]]
    over = f"over {', '.join(f'`{rival}`' for rival in rivals)}"
    rows = [["spec", "bytes / entry", *(cell for run in runs for cell in (f"ms, {cluster(run['hosts'], run['rate'])}", over))]]
    for at, first in enumerate(runs[0]["lines"]):
        row = [f"`{first['way']}`", f"{gradient_bytes(runs[0], first['way']):.2f}"]
        for line in (run["lines"][at] for run in runs):
            ratios = [ratio(line["over"].get(rival), "-") for rival in rivals]
            row += [f"{line['ms']['median']:,.0f}", ", ".join(ratios)]
        rows.append(row)
    return rows


def ratio(over: Line | None, missing: str) -> str:
    """Write the median of a ratio, and its bound."""
    return missing if over is None else f"{over['median']:.2f} ({over['at_most']:.2f})"


def gradient_bytes(run: Any, way: str) -> float:
    """Return the bytes that a host's interface sends for each entry of the gradients: the parameters' are in `none`."""
    none, own = (next(line for line in run["lines"] if line["way"] == each) for each in ("none", way))
    sent: float = own["interface_bytes_per_step"] - none["interface_bytes_per_step"]
    return sent / int(run["parameters"])


# The specs of the bytes as hosts are added, and what the chart calls them; and the numbers of hosts in the table, of which the
# messages and the memory are those with the most.
SCALED = {"stock": "stock", "bf16": "bf16", "powersgd:rank=4": "PowerSGD 4", "blocks": "blocks", "orq": "orq", "topk": "topk"}
SCALED |= {"topk:route=split": "topk, split", "topk:route=tree": "topk, tree", "gs_sgd": "gs_sgd"}
SCALED |= {"topk:by_host=true": "topk, by host"}
SCALED_HOSTS = (4, 16, 64, 1024)


def by_hosts() -> dict[str, dict[int, Line]]:
    """Return the lines of scale.json by spec and hosts."""
    found: dict[str, dict[int, Line]] = {}
    for line in read(RESULTS / "scale.json")["lines"]:
        found.setdefault(line["spec"], {})[line["hosts"]] = line
    return found


def scale() -> Rows:
    """Write a row for each spec: megabytes with a few and with many hosts, and what many take besides."""
    lines, most = by_hosts(), SCALED_HOSTS[-1]
    rows = [
        [
            "spec",
            *(f"{hosts:,} hosts" for hosts in SCALED_HOSTS),
            *(f"{each}, {most:,}" for each in ("messages", "MB received")),
        ]
    ]
    for spec in SCALED:
        megabytes = [f"{lines[spec][hosts]['interface_bytes'] / 1e6:,.1f}" for hosts in SCALED_HOSTS]
        many = lines[spec][most]
        rows.append([f"`{spec}`", *megabytes, f"{many['messages']:,}", f"{many['received_bytes'] / 1e6:,.1f}"])
    return rows


# benchmarks/loops.md

LOOP_SPECS, KINDS = ("topk", "sdagc", "orq"), ("sgd", "adamw")
EXACT = "topk:ratio=1,momentum=0,wire=exact"
OF_PROGRAMS = {"": "without gradcomp", "dense": "`dense`", EXACT: "all entries, exactly", "topk": "`topk`"}


def loops() -> Rows:
    """Write a row for each loop under DDP: the scores of DDP alone and of each spec, by SGD and by AdamW."""
    lines = read(RESULTS / "loops-ddp.json")["cells"]
    by_key = {(name, kind, spec): line for line in lines for name, _, kind, spec in [line["key"]]}
    rows = [["loop", "alone", *(f"`{spec}`" for spec in LOOP_SPECS)]]
    for name in dict.fromkeys(name for name, _, _ in by_key):
        kinds = [kind for kind in KINDS if (name, kind, LOOP_SPECS[0]) in by_key]
        alone = "/".join(figure(by_key[name, kind, LOOP_SPECS[0]]["plain"], "{:.1f}", "refused") for kind in kinds)
        rows.append([name, alone, *("/".join(loop(by_key[name, kind, spec]) for kind in kinds) for spec in LOOP_SPECS)])
    return rows


def loop(line: Line) -> str:
    """Write a score, and how it compares where it is below that of DDP alone."""
    if line["score"] is None:
        return str(line["verdict"])
    word = {"late": " later", "warned": " warned", "worse": " worse"}.get(line["verdict"], "")
    return f"{line['score']:.1f}{word}"


def programs() -> Rows:
    """Write a row for each program of others that CPUs can run: its outcome without gradcomp and under each spec."""
    rows = [["program", *OF_PROGRAMS.values()]]
    lines = {(line["program"], line["spec"]): line for line in read(RESULTS / "strangers.json")["lines"]}
    for program in dict.fromkeys(program for program, _ in lines):
        outcomes = [summary(lines[program, spec]) if (program, spec) in lines else "-" for spec in OF_PROGRAMS]
        rows += [[f"`{program}`", *outcomes]] if not outcomes[0].startswith("failed") else []
    return rows


# docs/which-spec.md

OVER_DDP = {"topk": "`topk`", "sdagc": "`sdagc`", "bf16": "bf16", "powersgd:rank=4": "PowerSGD"}


def links() -> Rows:
    """Write two rows for each link: the steps of two models by each way, over those of DDP alone; of `blocks`, one model's."""
    rows, five_bits = [["link of each host, model", "`blocks`", *OVER_DDP.values()]], blocks_over_ddp()
    for rate in LINKS_OF_PAGES:
        for task, about in {"cifar-large": "images", "shakespeare": "text"}.items():
            lines = {line["way"]: line for line in launched(task, "ddp")[4, rate]["lines"]}
            over = [f"{lines[way]['over']['stock']['median']:.2f}" for way in OVER_DDP]
            label = f"{cluster(4, rate).partition(', ')[2]}, {about}"
            rows.append([label, five_bits[rate] if about == "images" else "", *over])
    return rows


def blocks_over_ddp() -> dict[str, str]:
    """Return the steps by `blocks` over those of DDP alone, by link."""
    runs = [run for name in ("cifar-large", "10gbit") for run in read(RESULTS / f"train-blocks-ddp-{name}.json")["runs"]]
    lines = {run["rate"]: line for run in runs for line in run["lines"] if line["way"] == "blocks"}
    return {rate: f"{line['over']['stock']['median']:.2f}" for rate, line in lines.items()}


# docs/local-steps.md

# The loss of dense local steps over DDP's in percent, by parameters and replicas: the fits of arXiv 2503.09799, carried down
# from 35 million parameters.
LAW = {139_008: {2: 1.6, 4: 4.1, 8: 7.5}, 474_624: {2: 1.4, 4: 3.6, 8: 6.7}}


# The records of local steps on texts, and what the page calls these.
TEXTS = {"shakespeare": "Shakespeare", "python": "Python's library"}


class Trained(NamedTuple):
    """Trainings of one way at its best rate. way: None for DDP, whose line is base."""

    text: str
    parameters: int
    optimizer: str
    steps: int
    ranks: int
    way: LocalWay | None
    rate: float
    line: Line
    base: Line | None = None

    @property
    def about(self) -> str:
        """Name the training."""
        return f"{self.text}, {self.steps:,} steps of {self.optimizer}, {self.parameters / 1e6:.2f} M parameters"

    @property
    def law(self) -> float | None:
        """Return the law's figure, if it has one of this way."""
        is_of_it = self.way is not None and self.way[0] == 30 and self.way.spec == "dense"
        return LAW[self.parameters].get(self.ranks) if is_of_it else None

    @property
    def ddps(self) -> list[float]:
        """Return DDP's perplexities by the seeds of this way."""
        assert self.base is not None
        ddp = dict(zip(self.base["seeds"], self.base["scores"], strict=True))
        return [ddp[seed] for seed in self.line["seeds"]]

    @property
    def over(self) -> list[float]:
        """Return by how many percent the loss of a held-out byte is above DDP's, by seed."""
        both = zip(self.line["scores"], self.ddps, strict=True)
        return [100 * (math.log(own) / math.log(ddp) - 1) for own, ddp in both]

    @property
    def order(self) -> tuple[int, float]:
        """Order the rates of a way: those with most seeds first, and then by training loss."""
        return -len(self.line["seeds"]), self.line["losses"][-1]


def local_trainings() -> list[Trained]:
    """Return DDP and the local steps of all records; of several rates, inner and outer, those with the least training loss."""
    found: dict[Any, Trained] = {}
    for name in ("best-rate", *sorted(path.stem[12:] for path in RESULTS.glob("study-local-python-*.json"))):
        record = read(RESULTS / f"study-local-{name}.json")
        for task, of in record["tasks"].items():
            text, _, muon = task.partition("-")
            for line in of["lines"]:
                way, settings = local_of(line["spec"]), of["settings"]
                trained = TEXTS[text], of["parameters"], muon.capitalize() or "AdamW", settings["steps"]
                one = Trained(*trained, record["ranks"] if way else 1, way, settings["lr"], line)
                key = (*one[:5], way and (way.every, way.spec))
                found[key] = min(one, found.get(key, one), key=lambda each: each.order)
    bases = {each[:4]: each.line for each in found.values() if each.way is None}
    ordered = sorted(found.values(), key=lambda each: (each[:5], each.line["compression"]))
    return [each._replace(base=bases[each[:4]]) for each in ordered]


def local_steps() -> Rows:
    """Write a row for each way: its loss and perplexity, how much larger they are than DDP's, the law's figure, its bytes."""
    rows = [["training", "replicas", "method", "loss", "over DDP's", "the law", "perplexity", "over DDP's"]]
    rows[0] += ["bytes, DDP's / sent", "rate; outer, momentum", "seeds"]
    before = ""
    for each in local_trainings():
        way, line = each.way, each.line
        cells = [each.about if each.about != before else "", f"{each.ranks if way else ''}"]
        cells += [f"`every={way.every}`, `{way.spec}`" if way else "DDP", f"{fmean(map(math.log, line['scores'])):.3f}"]
        cells += [f"{fmean(each.over):+.1f} %" if way else "", figure(each.law, "{:+.1f} %", ""), f"{line['score']:.2f}"]
        cells += [f"{100 * (line['score'] / fmean(each.ddps) - 1):+.1f} %" if way else "", f"{line['compression']:,.0f} x"]
        rates = f"{each.rate:g}" + (f"; {way.rate:g}, {way.momentum:g}" if way else "")
        rows.append([*cells, rates, str(len(line["seeds"]))])
        before = each.about
    return rows


def way_of(line: Line) -> LocalWay:
    """Return the local steps of a line that is not DDP's."""
    way = local_of(line["spec"])
    assert way is not None
    return way


# benchmarks/step-times.md

# The kernels of the page, and what it calls them.
KERNELS = {
    "accumulate, take_topk": "accumulate and exact top-k of 0.1 %",
    "torch add_, top-k, gather, fill": "the same in plain torch",
    "accumulate, moments, take_above": "accumulate, moments, entries beyond 3.3 deviations",
    "ORQ-3, round and add": "ORQ-3: levels, words, and these decoded and added",
}


def kernels() -> Rows:
    """Write a row for each kernel."""
    lines = {line["name"]: line for line in read(RESULTS / "kernels-cpu-amd-epyc.json")["lines"]}
    rows = [["", "x the time of `add_`", "share of copy bandwidth"]]
    for name, called in KERNELS.items():
        times, share = (lines[name][key] for key in ("ratio_to_add", "share_of_copy"))
        rows.append([called, f"{times['median']:.1f}", f"{100 * share:.0f} %" if share else ""])
    return rows


def weights() -> Rows:
    """Write a row for the bits of gathered weights: bytes beside bfloat16's by formula, and scores beside whole weights'."""
    text, tones = ({line["spec"]: line for line in lines_of(name)} for name in ("weights", "weights-pitch"))
    rows = [
        [
            "bits",
            "bytes of weights",
            "of a step",
            "squared error of a weight",
            f"perplexity added to {text['dense']['score']:.2f}",
            f"points lost of {tones['dense']['score']:.2f} %",
        ]
    ]
    for bits, error in WEIGHT_ERRORS.items():
        each = bits + 0.25  # and gradients of 5.25 bits, in place of 16 twice and 32
        trained = [of[f"weights:bits={bits}"] for of in (text, tones)]
        scores = [f"{line['worse_than_dense']:.2f} ({line['worse_at_most']:.2f})" for line in trained]
        rows.append([f"{bits}", f"{each / 16:.2f}", f"{(2 * each + 5.25) / 64:.2f}", f"below {error:.0e}", *scores])
    return rows


def mixed() -> Rows:
    """Write a row for each way of FSDP2 with few bits: the bytes on a host's interface, and its step over bfloat16 weights'."""
    found = {run["rate"]: run for name in ("weights", "10gbit") for run in read(RESULTS / f"train-fsdp-{name}.json")["runs"]}
    runs = [found[rate] for rate in LINKS_OF_PAGES]
    rivals = ("mixed", "mixed-alltoall")
    links = [cluster(4, run["rate"]).partition(", ")[2] for run in runs]
    rows = [["method", "MB per step", *(f"over `{rival}`, {link}" for rival in rivals for link in links)]]
    for at, first in enumerate(runs[0]["lines"]):
        cells = [ratio(run["lines"][at]["over"].get(rival), "") for rival in rivals for run in runs]
        rows.append([f"`{first['way']}`", f"{first['interface_bytes_per_step'] / 1e6:.1f}", *cells])
    return rows


def machines() -> Rows:
    """Write a row for each bare machine that has run the present commands, with the present torch: the minutes of each."""
    rows = [["bare machine", "installs", "set-up and first demo", "demo again", "`scripts/check`"]]
    for cell in read(RESULTS / "machines.json")["cells"]:
        minutes = cell["minutes"] if isinstance(cell["minutes"], dict) else {}
        if "set-up and demo" in minutes and not cell["cell"].endswith("-oldest"):
            system, compiler, _ = re.sub(r"([a-z])(\d)", r"\1 \2", cell["cell"]).split("-")
            names = f"{system.capitalize()}, {compiler.upper()}"
            installed = ", ".join(re.findall(r"(?:torch|horovod) [\w.]+", cell["ready"])).replace("horovod", "Horovod")
            rows.append([names, installed, *(f"{minutes[each]} min" if each in minutes else "" for each in MACHINE_COMMANDS)])
    return rows


# The commands of tests/long/test_machines.py that users wait for.
MACHINE_COMMANDS = ("set-up and demo", "demo", "check")
# The bits in which weights travel, and the squared error, over that of the weight, that tests/fsdp/test_weights.py allows.
WEIGHT_ERRORS = {8: 2e-5, 6: 4e-4, 5: 2e-3, 4: 1e-2}
FSDP2 = {"fsdp": "shards", "hsdp": "replicas of two shards", "replicate": "replicas"}
TASKS = {"cifar-large": "CIFAR, SGD", "shakespeare": "text, AdamW"}
STEP_TIMES: dict[str, Callable[[], Rows]] = {
    f"{about}, {called}": lambda task=task, door=door: steps(task, door)  # type: ignore[misc]
    for task, about in TASKS.items()
    for door, called in DOORS.items()
}
STEP_TIMES |= {f"FSDP2, {about}": lambda door=door: fsdp2(door) for door, about in FSDP2.items()}  # type: ignore[misc]

# The tables of each page, by the places that are marked for them.
PAGES: dict[Path, dict[str, Callable[[], Rows]]] = {
    ROOT / "README.md": {"step times": readme_steps, "longest trainings": longest},
    ROOT / "benchmarks" / "step-times.md": {**STEP_TIMES, "scale": scale, "kernels": kernels},
    ROOT / "benchmarks" / "loops.md": {
        "loops": loops,
        "programs": programs,
        "trainers": lambda: losses(read(RESULTS / "trainers-plain.json")["cells"]),
    },
    DOCS / "which-spec.md": {"links": links},
    DOCS / "local-steps.md": {"losses": local_steps},
    DOCS / "start.md": {"machines": machines},
    DOCS / "fsdp.md": {"bits": weights, "weights": mixed},
}


def written(page: Path, text: str) -> str:
    """Return a page's text with the tables of the records."""
    for place, rows in PAGES[page].items():
        text = filled(page, text, place, rows())
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page, page.read_text()))
