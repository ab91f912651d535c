"""The ranks of a table of loops and of a soak: programs for tests/helpers/ranks, and their launch."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # ranks find this file by its place

import torch

from laboratory.loops.cases import CASES
from laboratory.loops.cell import Key, of_cell
from laboratory.loops.soak import Plan, soaked
from laboratory.loops.trainers import TRAINERS, as_torchrun
from laboratory.machine import ROOT
from laboratory.tasks import table


def launch(program: str, count: int, *arguments: Any, **options: Any) -> list[Any]:
    """Run a program of this file on each of so many ranks. Return what they report. options: of the launch."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import ranks  # type: ignore[import-not-found]

    reports: list[Any] = ranks.launch(globals()[program], count, *arguments, **options)
    return reports


def begin(door: str) -> tuple[int, int]:
    """Join the other ranks. Return the rank, and their number."""
    torch.set_num_threads(1)
    if door == "ddp":
        import ranks

        ranks.join()
    elif door == "horovod":
        import horovod.torch as hvd

        hvd.init()
    return int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])


def play(cells: list[list[Any]], text: str = "") -> list[dict[str, Any]]:
    """Train cells until one is refused. Its exchange may have broken off, so that only its report is left to do.

    text: the prepared file of a task that reads one.
    """
    import rank_server  # type: ignore[import-not-found]

    begin(door := cells[0][1])
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


def soak(network: str, seed: int, steps: int) -> dict[str, Any]:
    """Train in trouble, and report what the judge needs."""
    import ranks

    warnings.simplefilter("default")
    return soaked(network, Plan(seed, steps), *begin(network), ranks.start_anew)
