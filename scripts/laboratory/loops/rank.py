"""A rank of a table of loops: a program for tests/helpers/ranks, which finds the laboratory by this file's place."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rank_server  # type: ignore[import-not-found] # of tests/helpers, which ranks have on their path
import ranks  # type: ignore[import-not-found]
import torch

from laboratory.loops.cases import CASES
from laboratory.loops.cell import Key, of_cell
from laboratory.loops.trainers import TRAINERS, as_torchrun
from laboratory.tasks import table


def play(cells: list[list[Any]], text: str = "") -> list[dict[str, Any]]:
    """Train cells until one is refused. Its exchange may have broken off, so that only its report is left to do.

    text: the prepared file of a task that reads one.
    """
    torch.set_num_threads(1)
    door = cells[0][1]
    if door == "ddp":
        ranks.join()
    elif door == "horovod":
        import horovod.torch as hvd

        hvd.init()
    found: list[dict[str, Any]] = []
    for fields in cells:
        key = Key(*fields)
        with as_torchrun() if key.case in TRAINERS and door == "ddp" else nullcontext():
            found.append(of_cell(key, {**CASES, **TRAINERS}[key.case], table.load(Path(text) if text else None)))
        if found[-1]["refused"]:
            rank_server.report(found)
            rank_server.end_together(5)
        gc.collect()
    return found
