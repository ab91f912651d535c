"""The figures in the tables of the algorithms' pages are those of the committed records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from documents import ROOT, record, study

PAGES = ROOT / "docs" / "algorithms"

# The trainings in a table of scores, and their records.
STUDIES = {
    "images, SGD with momentum, 800 steps, 5 seeds": ["cifar-queue", "cifar-quantisers-present"],
    "images, 30 epochs, 3 seeds": ["cifar-present", "cifar-present-ratios", "cifar-present-rest"],
    "text, AdamW, 250 steps, rate 0.001, 5 seeds": ["blocks-text"],
    "text, AdamW, 500 steps, rate 0.004, 5 seeds": ["blocks-text-best-rate"],
    "text, AdamW, 3,000 steps, 3 seeds": ["text-present-16e3"],
    "fine-tuning, AdamW, 5 seeds": ["pitch-present-1e-3"],
    "LoRA, AdamW, 5 seeds": ["adapters"],
    "images, SGD with momentum, 5 seeds": ["blocks-cifar"],
    "digits, SGD with momentum, 5 seeds": ["blocks-conv"],
}
OLDER = ["quantisers-conv", "quantisers-text"]


def tables(heading: str) -> Iterator[tuple[Path, str, list[list[str]]]]:
    """Find all tables with this heading: their page, the text before them, and their cells without bold type."""
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text().replace("**", "")
        for table in re.finditer(rf"^{re.escape(heading)}\n\|[-:|]+\n((?:\|.+\n)+)", text, re.MULTILINE):
            cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.group(1).splitlines()]
            yield page, text[: table.start()], cells


def test_scores_against_dense() -> None:
    found = 0
    for page, _, rows in tables("| training | compressor | difference from uncompressed | bytes, uncompressed / sent |"):
        training = ""
        for label, spec, worse, ratio in rows:
            training = training if label == "the same" else label
            said = f"{page.name}: {label}, {spec}"
            line = line_of([*STUDIES[training]], spec.strip("`"))
            assert len(line["seeds"]) >= 3, said
            assert float(re.findall(r"-?[\d.]+", worse)[0]) == rounded(line["worse_than_dense"]), said
            assert float(re.findall(r"bound (-?[\d.]+)", worse)[0]) == rounded(line["worse_at_most"]), said
            assert ratio in (f"{line['compression']:,.0f} x", f"{line['compression']:.1f} x"), said
            found += 1
    assert found >= 16


def line_of(names: list[str], spec: str) -> Any:
    """Find a spec's line, in the canonical form or with the default that the study wrote out."""
    own = {key: line for name in names for key, line in study(name).items()}
    written = {"topk": "topk:ratio=0.01", "sdagc": "sdagc:density=0.01"}
    return own.get(spec) or own[written[spec]]


def rounded(value: float) -> float:
    return round(value, 2)


def test_scores_and_errors_of_the_older_trainings() -> None:
    found = 0
    studies = [study(name) for name in OLDER]
    for page, _, rows in tables("| | conv, 10 seeds | error | an LSTM's error |"):
        for label, score, *errors in rows:
            spec = re.sub(r"[:,]feedback=true", "", label.strip("`"))
            own = [
                study[spec if spec == "dense" else f"{spec}{',' if ':' in spec else ':'}route=allgather"] for study in studies
            ]
            assert float(score.removesuffix(" %")) == round(own[0]["score"], 2), f"{page.name}: {label}"
            for line, error in zip(own, errors, strict=True):
                assert spec == "dense" or float(error) == round(line["squared_error"], 2), f"{page.name}: {label}"
                found += 1
    assert found == 2 * 10


def test_how_much_more_the_baselines_err() -> None:
    """On three nets, over ORQ with as many levels."""
    for name in (*OLDER, "quantisers-mlp"):
        errors = {
            spec.removesuffix("route=allgather").rstrip(":,"): line["squared_error"] for spec, line in study(name).items()
        }
        for levels in (5, 9):
            own = errors[f"orq:levels={levels}"]
            assert 2 < errors[f"qsgd:levels={levels},norm=max"] / own < 4.1 and errors[f"qsgd:levels={levels}"] / own > 28
            assert errors[f"linear:levels={levels}"] / own > 2
        assert 0.99 < errors["terngrad"] / errors["orq:sigmas=2.5"] < 1.032 and errors["bingrad"] < errors["sign"]


def test_scores_and_times_of_sums() -> None:
    model = record("compare-sketches")["models"][0]
    clusters = {(each["hosts"], each["rate"]): each["lines"] for each in model["clusters"]}
    chosen = [clusters[4, "1gbit"], clusters[4, "100mbit"], clusters[8, "100mbit"]]
    heading = "| | 4 hosts, 1 Gbit/s | 4 hosts, 100 Mbit/s | 8 hosts, 100 Mbit/s | bytes per process | accuracy |"
    found = 0
    for page, _, rows in tables(heading):
        for label, *cells in rows:
            name = label.strip("`")
            spec = name if name == "dense" else f"{name}:ratio=0.001,momentum=0.9"
            own = [next(line for line in of_cluster if line["spec"] == spec) for of_cluster in chosen]
            score = study("sketches-present")[spec.removesuffix(",momentum=0.9")]["score"]
            times = [f"{line['ms']['median']:,.0f} ms" for line in own]
            size = own[0]["bytes_per_step"]
            sent = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} KB"
            assert cells == [*times, sent, f"{score:.1f} %"], f"{page.name}: {label}"
            found += 1
    assert found == 5


def test_errors_of_rounding() -> None:
    rounded_texts = {line["way"]: line for line in record("rounding-texts")["lines"]}
    found = 0
    for page, _, rows in tables("| | bits per entry | error at step 10 | 50 | 150 | for Adam, at step 150 |"):
        for label, bits, *cells in rows:
            line = rounded_texts[label.removesuffix(", bf16").strip("`")]
            wanted = [f"{each:.1e}" for each in (*line["errors"], line["for_adam"][-1])]
            assert bits == f"{line['bits']:.2f}" and cells == wanted, f"{page.name}: {label}"
            found += 1
    assert found >= 4
    most = {"blocks:bits=4": 8e-3, "blocks": 1.5e-3}
    assert all(max(rounded_texts[way]["errors"]) <= bound for way, bound in most.items())


def test_pictures_end_as_denses_do() -> None:
    """The difference is far below the noise of dense's own seeds."""
    for name in ("blocks-cifar", "blocks-conv"):
        found = study(name)
        assert all(found[spec]["worse_than_dense"] < found["dense"]["score_error"] / 3 for spec in ("blocks", "blocks:bits=4"))


def test_what_five_bits_take() -> None:
    page = (PAGES / "blocks.md").read_text()
    runs = [run for name in ("cifar-large", "10gbit") for run in record(f"train-blocks-ddp-{name}")["runs"]]
    assert {run["rate"] for run in runs} == {"100mbit", "1gbit", "10gbit"}
    for run in runs:
        over = next(line["over"] for line in run["lines"] if line["way"] == "blocks")
        cells = [f"{over[way]['median']:.2f} ({over[way]['at_most']:.2f})" for way in ("stock", "bf16")]
        link = run["rate"].replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")
        assert f"| {link} | {cells[0]} | {cells[1]} |" in page and over["stock"]["at_most"] <= 1.05
    found = {line["name"]: line["ratio_to_add"]["median"] for line in record("kernels-blocks-cpu-amd-epyc")["lines"]}
    assert found["Simulation step, blocks"] <= 6
