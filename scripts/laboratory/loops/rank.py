"""A rank of the table of loops: a program for tests/helpers/ranks, which finds the laboratory by this file's place."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rank_server  # type: ignore[import-not-found] # of tests/helpers, which ranks have on their path
import ranks  # type: ignore[import-not-found]
import torch

from laboratory.loops.cases import CASES
from laboratory.loops.cell import Key, of_cell


def play(cells: list[list[Any]]) -> list[dict[str, Any]]:
    """Train cells until one is refused. Its exchange may have broken off, so that only its report is left to do."""
    torch.set_num_threads(1)
    if cells[0][1] == "ddp":
        ranks.join()
    else:
        import horovod.torch as hvd

        hvd.init()
    found: list[dict[str, Any]] = []
    for fields in cells:
        key = Key(*fields)
        found.append(of_cell(key, CASES[key.case].play))
        if found[-1]["refused"]:
            rank_server.report(found)
            rank_server.end_together(5)
        gc.collect()
    return found
