"""The page of claims holds the tables of the committed results, and scripts/claims refuses what it cannot do."""

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the page of claims was NOT compared with results: scikit-learn is not installed")

from laboratory.commands import study

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "claims.md"
STUDIES = sorted(
    path.stem for path in (ROOT / "benchmarks" / "results").glob("study-*.json") if f"{path.stem}.json" in PAGE.read_text()
)


def test_the_page_names_the_results_that_the_script_makes() -> None:
    script = (ROOT / "scripts" / "claims").read_text()
    assert STUDIES and all(f"  {name.removeprefix('study-')})" in script for name in STUDIES)


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_holds_the_table_of_its_results(name: str) -> None:
    content = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    for task, found in content["tasks"].items():
        table = study.markdown(task, found["lines"]).partition("\n\n")[2]
        assert table in PAGE.read_text(), f"docs/claims.md needs this table:\n{table}"


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
