"""The figures of the pages are those of the records: steps on clusters, and what a choice rests on."""

from __future__ import annotations

import math
import re
from itertools import product
from pathlib import Path

import pytest
from documents import ROOT, record, study

from documentation import tables
from laboratory.commands import strangers, trainers
from laboratory.loops.trainers import TRAINERS

WHICH = (ROOT / "docs" / "which-spec.md").read_text()


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_those_of_the_records(page: Path) -> None:
    text = page.read_text()
    assert text == tables.written(page, text), "run PYTHONPATH=scripts python -m documentation.tables"
    other = re.sub(r"(<!-- records: [^>]+ -->\n\n)\|.*?(\n\n<!-- end)", r"\1old\2", text, flags=re.DOTALL)
    assert "old\n\n<!-- end" in other and text == tables.written(page, other), "a page with other figures is written anew"


def test_no_loop_is_worse_unsaid() -> None:
    page = (ROOT / "benchmarks" / "loops.md").read_text()
    assert "\n| base | " in page and "worse |" not in page


def test_what_readme_says_before_its_table() -> None:
    """How much faster `blocks` is by link, and what a GPT's step takes beside its exchange."""
    readme = (ROOT / "README.md").read_text()
    runs = {run["rate"]: {line["way"]: line["ms"]["median"] for line in run["lines"]} for run in record("train-readme")["runs"]}
    assert [*runs] == ["100mbit", "1gbit", "10gbit"]
    faster = [ms["stock"] / ms["blocks"] for ms in runs.values()]
    intro = readme[: readme.index("\n## ")]
    assert re.findall(r"([\d.]+) times as fast", intro) == [f"{each:.2g}" for each in faster[:2]] and 1 < faster[2] < 1.05
    gpt = record("gpt-h200")
    gpu = [next(line["step_ms"] for line in gpt["ways"] if line["way"] == way) for way in ("ddp", "bf16", "topk")]
    (bullet,) = re.findall(r"\*\*GPU overhead:\*\*((?:.*\n)+?)- ", readme)
    assert re.findall(r"\b\d\d\b", bullet) == [f"{each:.0f}" for each in gpu]
    parameters = gpt["settings"]["parameters"]
    exchange = 8 * parameters * 3 / 4 / 1.25e9
    said = re.findall(r"([\d.]+) s for (\d+) million parameters .*?in ([\d.]+) s", intro, re.DOTALL)
    assert said == [(f"{exchange:.2f}", f"{parameters / 1e6:.0f}", f"{gpu[0] / 1e3:.2f}")]


def test_the_bytes_as_hosts_are_added() -> None:
    on = {spec: of[1024]["interface_bytes"] for spec, of in tables.by_hosts().items()}
    assert on["topk"] > on["stock"] > on["bf16"] > 3 * on["blocks"] and on["topk:route=split"] < on["topk"] / 100


def costs(name: str, spec: str) -> tuple[float, float, float]:
    """Return dense's score in a study of three seeds or more, how much worse a spec ends, and the bound of that."""
    lines = study(name)
    assert len(lines[spec]["seeds"]) >= 3
    return lines["dense"]["score"], lines[spec]["worse_than_dense"], lines[spec]["worse_at_most"]


# The row of a compressor: its records of pictures and of a text, and its spec in them.
ROWS = {
    "blocks": ("cifar-present-rest", "text-present-16e3", "blocks"),
    "orq": ("cifar-present", "text-present-16e3", "orq"),
    "sdagc": ("cifar-queue", "", "sdagc:density=0.01"),
    "topk": ("cifar-present", "text-present-16e3", "topk:ratio=0.01"),
    "half": ("cifar-quantisers-present", "", "half"),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_scores_of_which_spec(row: str) -> None:
    *names, spec = ROWS[row]
    found = [costs(name, spec) if name else None for name in names]
    cells = ["" if each is None else f" {each[1]:.2f} ({each[2]:.2f})" for each in found]
    said = rf"\| `{row}` \| [^|]+ \| [0-9. to]+ \| [0-9./ ]+ \|{re.escape(' |'.join(cells))} \|"
    assert re.search(said, WHICH), (row, cells)


def test_the_ratios_of_which_spec() -> None:
    """A gather's link carries 2 / P of the ratio of payloads."""
    lines = {
        name: {each["spec"]: each for each in record(f"{name}")["tasks"]["cifar"]["lines"]} for name in ("study-cifar-queue",)
    }
    for spec, name in (("topk", "topk:ratio=0.01"), ("sdagc", "sdagc:density=0.01")):
        ratio = lines["study-cifar-queue"][name]["compression"]
        on_links = "/".join(f"{ratio * 2 / hosts:.0f}" for hosts in (4, 8, 16, 32))
        assert re.search(rf"\| `{spec}` \| [^|]+ \| {ratio:.0f} \| {on_links} \|", WHICH), (spec, on_links)
    simulated = tables.by_hosts()
    for spec in ("blocks", "orq"):
        (said,) = re.findall(rf"\| `{spec}` \| [^|]+ \| ([0-9.]+) \| \1/\1/\1/\1 \|", WHICH)
        for hosts in (4, 16):
            stock, own = (simulated[each][hosts]["interface_bytes"] for each in ("stock", spec))
            assert float(said) == pytest.approx(stock / own, rel=0.01), (spec, hosts)


@pytest.mark.parametrize("door", tables.FSDP2)
def test_what_the_hosts_interfaces_carry_under_fsdp2(door: str) -> None:
    """In bytes of float32: what four ranks need, by (P - 1) / P over shards and 2 (P - 1) / P over replicas, and gloo moves."""
    needs, gloo = {"fsdp": (3.0, 6.0), "hsdp": (4.0, 6.0), "replicate": (6.0, 6.0)}[door]
    for run in record(f"train-blocks-{door}")["runs"]:
        assert run["ranks"] == 4 and run["parameters"] > 10e6
        found = {way: tables.gradient_bytes(run, way) for way in run["ways"]}
        assert found["none"] == 0 and found["blocks"] <= 0.18 * needs
        assert 1 < found["stock"] / gloo < 1.01 and 1 < 2 * found["bf16"] / gloo < 1.01
        assert door != "fsdp" or (1 < found["alltoall"] / needs < 1.01 and 1 < 2 * found["half"] / needs < 1.01)


def test_weights_in_eight_bits_cost_next_to_nothing() -> None:
    lines = {line["spec"]: line for line in record("study-weights-8-bits")["tasks"]["shakespeare"]["lines"]}
    dense, rounded = lines["dense"], lines["weights:bits=8"]
    assert len(dense["seeds"]) == len(rounded["seeds"]) == 69
    assert abs(rounded["worse_than_dense"]) < 0.005 and rounded["worse_at_most"] < 0.02
    assert rounded["worse_at_most"] / dense["score"] / math.log(dense["score"]) < 0.0014
    assert 0.0005 < rounded["losses"][-1] / dense["losses"][-1] - 1 < 0.0015
    (fast,) = (run["lines"] for run in record("train-fsdp-10gbit")["runs"])
    few = [line["over"]["mixed"]["at_most"] for line in fast if line["way"].startswith("weights")]
    assert len(few) == 3 and max(few) <= 0.85


def test_every_trainer_has_a_loss_that_is_near() -> None:
    plain = record("trainers-plain")
    every = record("trainers-gpt")["cells"]
    found = {tuple(line["key"]): (line["score"], line["plain"]) for line in every}
    for lines, own in ((plain["cells"], [name for name in TRAINERS if name.startswith("plain")]), (every, TRAINERS)):
        assert {tuple(line["key"][::3]) for line in lines} == set(product(own, trainers.SPECS.split(";")))
        assert len(lines) == 2 * len(own) * len(trainers.SPECS.split(";"))
        worse = [line["key"] for line in lines if line["verdict"] not in ("ok", "refused")]
        assert not worse, "a training that is worse than the trainer alone"
    for (name, _, kind, spec), losses in found.items():  # auto chooses by time
        if not name.startswith("plain") and not spec.startswith("auto"):
            assert losses == found["plain, clip_grad_norm_", "ddp", kind, spec], (name, kind, spec)
    assert {line["seeds"] for line in plain["cells"]} == {3}


def test_local_steps_train_as_torchfts_do() -> None:
    """The page's sentence: as many bytes and the same perplexity with dense, and sign's."""
    torchft, dense, sign = record("strangers-torchft")["lines"]
    assert (torchft["spec"], dense["spec"], sign["spec"]) == ("", "dense", "sign")
    assert (dense["perplexity"], dense["bytes"]) == (torchft["perplexity"], torchft["bytes"])
    said = f"torchft {torchft['version']} and `dense` end with the same perplexity, {dense['perplexity']:.3f}, and bytes; "
    said += f"`sign` with {sign['perplexity']:.3f} and {dense['bytes'] / sign['bytes']:.0f} times fewer"
    assert said in " ".join((ROOT / "docs" / "frameworks.md").read_text().split())


def test_the_outcomes_of_others_programs() -> None:
    """Programs that fail without gradcomp in the same way, on CPUs, are named apart."""
    lines = record("strangers")["lines"]
    assert {line["spec"] for line in lines} == {*tables.OF_PROGRAMS}
    stock = {each["program"]: strangers.summary(each) for each in lines if not each["spec"]}
    cannot = [name for name, outcome in stock.items() if outcome.startswith("failed")]
    assert cannot == ["accelerate-comm-hook", "timm-train"]
    assert all("device_ids" in each["error"] for each in lines if each["program"] in cannot)
    ours = next(each["failed"] for each in lines if each["program"] == "horovod-tests" and each["spec"] == "topk")
    others = {name for name, said in ours.items() if "Muon" not in said}
    assert others == {"test_broadcast_state", "test_gradient_clipping"}
