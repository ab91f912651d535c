"""A gradient's way, as CONTRIBUTING.md has it: seven files, none entered more than twice."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import ranks

pytestmark = pytest.mark.slow

WAY = [
    "horovod.py",
    "engine/session.py",
    "engine/reducer.py",
    "engine/feedback.py",
    "compressors/topk.py",
    "exchanges/routes.py",
    "networks/horovod.py",
]
BACK = [
    "horovod.py",
    "engine/session.py",
    "engine/reducer.py",
    "networks/horovod.py",
    "compressors/topk.py",
    "exchanges/routes.py",
]
COMPUTES_AND_RETURNS = ("native/", "messages/", "requests.py", "protocol.py", "engine/parameters.py", "networks/carrier.py")


def test_a_gradient_passes_seven_files_none_more_than_twice() -> None:
    """Properties that are read on the way, and what only computes and returns, are no stations of it."""
    visits = [file for file in ranks.launch("horovod_walk", 2)[0] if not file.startswith(COMPUTES_AND_RETURNS)]
    stations = [file for file, _ in itertools.groupby(visits)]
    assert stations == [*WAY, "step", *BACK]


def test_the_way_is_written_down() -> None:
    text = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text()
    rows = [line.split("|")[2].strip().strip("`") for line in text.splitlines() if line[:3] in {f"| {i}" for i in range(1, 8)}]
    assert rows == WAY
