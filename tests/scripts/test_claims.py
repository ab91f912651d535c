"""The tables of studies and of auto beside stock hold figures of the committed results; scripts/claims refuses wrong words."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
from documents import RECORDS, ROOT, record

from laboratory.commands import study
from laboratory.commands.steps import cluster

STUDIES_PAGE = (ROOT / "benchmarks" / "studies.md").read_text()
STUDIES = sorted(path.stem for path in RECORDS.glob("study-*.json") if path.name in STUDIES_PAGE)
RUNS = sorted(path.stem for path in RECORDS.glob("train-never-*.json"))


def test_the_page_names_the_results_that_the_script_makes() -> None:
    script = (ROOT / "scripts" / "claims").read_text()
    assert STUDIES and all(f"  {name.removeprefix('study-')})" in script for name in STUDIES)


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_holds_the_table_of_its_results(name: str) -> None:
    for found in record(name)["tasks"].values():
        table = study.markdown(found["score"], found["lines"])
        assert table in STUDIES_PAGE, f"benchmarks/studies.md needs this table:\n{table}"


@pytest.mark.parametrize(
    "words,said",
    [
        (["nowhere"], "nowhere is not a folder"),
        ([str(ROOT), "cifer"], "there is no study cifer; there are cifar-best"),
        (["--jobs"], "unknown option --jobs"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str) -> None:
    done = subprocess.run([ROOT / "scripts" / "claims", *words], capture_output=True, text=True)
    assert done.returncode == 1 and said in done.stderr


def rows() -> dict[str, list[str]]:
    """Read the page's table: the other cells of each row, by its first one."""
    _, _, after = (ROOT / "benchmarks" / "step-times.md").read_text().partition("| link | `auto` chose |")
    lines = after.partition("\n\n")[0].splitlines()[2:]
    return {cells[0]: cells[1:] for line in lines for cells in [[cell.strip() for cell in line.strip("|").split("|")]]}


def link(rate: str) -> str:
    """Name a link as the table does."""
    named = cluster(4, rate).partition(", ")[2]
    return "no limit" if named == "unshaped" else named


def said(run: Any) -> tuple[str, list[str]]:
    """Return a run's row: its link, the way that auto went on with, its time over stock's, and over bf16's."""
    (line,) = (line for line in run["lines"] if line["way"] == "auto")
    over = line["over_after" if run["later"] else "over"]
    times = [f"{of['median']:.2f} ({of['at_most']:.2f})" for of in (over["stock"], over["bf16"])]
    place = f"{link(run['later'][0])}, after {link(run['rate'])}" if run["later"] else link(run["rate"])
    return place, [line["auto"]["way"], *times]


def test_every_row_is_that_of_a_record_and_every_run_has_its_row() -> None:
    table = rows()
    runs = dict(said(run) for name in RUNS for run in record(name)["runs"])
    assert table.keys() == runs.keys()
    for row, (way, *figures) in runs.items():
        chose, *cells = table[row]
        assert [cell.replace("at most ", "") for cell in cells] == figures, row
        assert chose.replace("`", "").endswith(way.replace("stock in bf16", "in bf16")), (row, way)


@pytest.mark.parametrize("name", RUNS)
def test_the_records_are_of_known_commits(name: str) -> None:
    shallow = ["git", "rev-parse", "--is-shallow-repository"]
    if not shutil.which("git") or subprocess.run(shallow, cwd=ROOT, capture_output=True, text=True).stdout.strip() != "false":
        pytest.skip("no git, or no repository with its history: whether the records' commits are known was NOT checked")
    commit = record(name)["commit"].removesuffix("-dirty")  # as the results themselves are, when the next one is made
    assert not subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT).returncode, commit
