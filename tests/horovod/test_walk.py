"""A gradient's way, as CONTRIBUTING.md has it: seven files, none entered more than twice."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from types import FrameType

import horovod.torch as hvd
import pytest
import ranks
import torch

import gradcomp
from gradcomp.engine import optimizer_steps
from gradcomp.engine.last_exchange import TRIAL

pytestmark = pytest.mark.slow

PACKAGE = Path(gradcomp.__file__).parent
WAY = [
    "horovod/compression.py",
    "engine/session.py",
    "engine/reducer.py",
    "engine/bucket.py",
    "compressors/topk.py",
    "exchanges/routes.py",
    "networks/horovod.py",
]
BACK = [
    "horovod/compression.py",
    "engine/session.py",
    "engine/reducer.py",
    "networks/horovod.py",
    "compressors/topk.py",
    "exchanges/routes.py",
    "engine/bucket.py",
]
# Beside the files of the way itself.
COMPUTES_AND_RETURNS = ("native/", "messages/", "core/", "engine/", "networks/waits.py")


def file_of(frame: FrameType | None) -> str | None:
    """Find the file of the package that a call comes from, whatever lies between."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            return path.relative_to(PACKAGE).as_posix()
        frame = frame.f_back
    return None


def is_hook(frame: FrameType | None) -> bool:
    """Tell whether a call comes from the hooks around the optimizer's step, which check and hide its settings."""
    while frame is not None:
        if frame.f_code.co_filename == optimizer_steps.__file__:
            return True
        frame = frame.f_back
    return False


def program() -> list[str]:
    """Train with stock Horovod and top-k; return the files that a step goes through, once no state is copied before it."""
    hvd.init()
    visits: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and PACKAGE in Path(frame.f_code.co_filename).parents and not is_hook(frame):
            here = file_of(frame)
            if here is not None and here != file_of(frame.f_back) and frame.f_code not in properties:
                visits.append(here)

    model = torch.nn.Linear(50, 40, bias=False)
    compression = gradcomp.horovod.Compression("topk:ratio=0.01", model.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), compression=compression
    )
    modules = [module for name, module in sys.modules.items() if name.startswith("gradcomp")]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    attributes = [value for kind in classes for value in vars(kind).values()]
    getters = [value.fget for value in attributes if isinstance(value, property)]
    properties = {getter.__code__ for getter in getters if hasattr(getter, "__code__")}  # torch's have none
    for turn in range(TRIAL + 1):
        visits.clear()
        optimizer.zero_grad()
        loss = model(torch.randn(3, 50)).sum()
        sys.setprofile(note if turn == TRIAL else None)
        loss.backward()
        visits.append("step")
        optimizer.step()
        sys.setprofile(None)
    return visits


def test_a_gradient_passes_seven_files_none_more_than_twice() -> None:
    """Properties that are read on the way, and what only computes and returns, are no stations of it."""
    visits = [file for file in ranks.launch(program, 2)[0] if file in WAY or not file.startswith(COMPUTES_AND_RETURNS)]
    stations = [file for file, _ in itertools.groupby(visits)]
    assert stations == [*WAY, "step", *BACK]


def test_the_way_is_written_down() -> None:
    text = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text()
    rows = [line.split("|")[2].strip().strip("`") for line in text.splitlines() if line[:3] in {f"| {i}" for i in range(1, 8)}]
    assert rows == WAY
    (listed,) = re.findall(r"files that compute and return at once:\s([^.]+)\.", text)
    assert re.findall(r"`([^`]+)`", listed) == [file.removesuffix(".py") for file in COMPUTES_AND_RETURNS]
