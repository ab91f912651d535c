"""The notebook: its cells run in order, and specs that send less train as well as dense does there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn", reason="the notebook was NOT run: scikit-learn is not installed")
pytest.importorskip("matplotlib", reason="the notebook was NOT run: matplotlib is not installed")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "simulation.ipynb"


def test_the_notebooks_cells_run_and_show_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    found: dict[str, Any] = {}
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), found)
    results = found["results"]
    assert capsys.readouterr().out.splitlines()[0].startswith("dense ")
    sent = [sum(results[spec]["sent"]) for spec in ("dense", "blocks", "orq:momentum=0.9", "topk:momentum=0.9")]
    assert sent == sorted(sent, reverse=True) and sent[0] > 100 * sent[-1]
    for spec, result in results.items():
        assert result["accuracy"] > results["dense"]["accuracy"] - 0.03, spec
