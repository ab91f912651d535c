"""A gradient's way through the package, by stock Horovod with top-k: from which file into which it goes, as Python sees it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import horovod.torch as hvd
import ranks
import torch

import gradcomp

hvd.init()
torch.set_num_threads(1)
PACKAGE = Path(gradcomp.__file__).parent
visits: list[str] = []


def file_of(frame: FrameType | None) -> str | None:
    """The file of the package that a call comes from, whatever lies between."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            return path.relative_to(PACKAGE).as_posix()
        frame = frame.f_back
    return None


def note(frame: FrameType, event: str, argument: object) -> None:
    if event == "call" and PACKAGE in Path(frame.f_code.co_filename).parents:
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
properties = {value.fget.__code__ for value in attributes if isinstance(value, property) and value.fget is not None}
for turn in range(3):
    visits.clear()
    optimizer.zero_grad()
    loss = model(torch.randn(3, 50)).sum()
    sys.setprofile(note if turn == 2 else None)
    loss.backward()
    visits.append("step")
    optimizer.step()
    sys.setprofile(None)
ranks.report(visits)
hvd.barrier()
