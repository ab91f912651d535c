"""Every Python block of the pages runs on two real ranks, with Horovod and torch.distributed, in the order of its page."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.distributed as dist
from documents import ROOT, USERS, Block, blocks, name_of
from ranks import join, launch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

# Pages whose code runs elsewhere, and where: by torchrun and by horovodrun, or in a trainer.
ELSEWHERE = {
    "docs/start.md": "docs/test_tutorials.py",
    "docs/frameworks.md": "integrations/by_transformers_fsdp.py",
}
# Pages whose blocks show one thing after the other, each with a model of its own.
APART = {"docs/training.md"}
# Pages that take a door as given.
DOORS = {"docs/training.md": "horovod", "docs/checkpoints.md": "ddp"}

CODE = {name_of(page): found for page in USERS if (found := [block for block in blocks(page) if block.language == "python"])}

Maker = Callable[["Assumed"], Any]


class Assumed(dict[str, Any]):
    """The names of a page's blocks. A name that no block has made yet comes from its maker."""

    def __init__(self, page: str):
        super().__init__()
        self._makers = makers(DOORS.get(page, ""))

    def __missing__(self, name: str) -> Any:
        if name not in self._makers:
            raise KeyError(name)
        self[name] = self._makers[name](self)
        return self[name]


def makers(door: str) -> dict[str, Maker]:
    """List the makers, for a rank.

    door: "ddp", where `model` is a DistributedDataParallel, "horovod", where `optimizer` is Horovod's, or none of them.
    """

    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    return {
        "torch": lambda names: torch,
        "nn": lambda names: nn,
        "hvd": lambda names: hvd,
        "gradcomp": lambda names: gradcomp,
        "DistributedDataParallel": lambda names: DistributedDataParallel,
        "Net": lambda names: Net,
        "criterion": lambda names: nn.functional.cross_entropy,
        "x": lambda names: torch.ones(2, 8),
        "y": lambda names: torch.tensor([0, 3]),
        "model": lambda names: DistributedDataParallel(Net()) if door == "ddp" else Net(),
        "scaler": lambda names: torch.amp.GradScaler("cpu"),
        "sgd": lambda names: torch.optim.SGD(names["model"].parameters(), lr=0.1, momentum=0.9),
        "optimizer": lambda names: compressed(names) if door == "horovod" else names["sgd"],
        "handle": lambda names: gradcomp.ddp.attach(names["model"], "topk", optimizer=names["optimizer"]),
        "ranks_per_site": lambda names: 1,
        "rank": lambda names: dist.get_rank(),
        "step": lambda names: 0,
        "folder": lambda names: Path.cwd(),
    }


def compressed(names: Assumed) -> Any:
    """Make a distributed optimizer of Horovod's."""
    return gradcomp.horovod.DistributedOptimizer(names["sgd"], names["model"].named_parameters(), scaler=names["scaler"])


def run(page: str, found: list[Block], folder: str) -> int:
    """Run a page's blocks on this rank. Return how many there were."""
    hvd.init()
    join()
    os.chdir(folder)
    names = Assumed(page)
    for block in found:
        if page in APART:
            names = Assumed(page)
        code = compile("\n" * (block.line - 1) + block.text, page, "exec")
        exec(code, names)
        dist.barrier()  # the next block may read what all ranks have written
    return len(found)


@pytest.mark.parametrize("page", [page for page in CODE if page not in ELSEWHERE])
def test_blocks_run(page: str, tmp_path: Path) -> None:
    assert launch(run, 2, page, CODE[page], str(tmp_path)) == [len(CODE[page])] * 2


def test_the_exceptions_are_pages_with_code() -> None:
    assert {*ELSEWHERE, *APART, *DOORS} <= CODE.keys()
    assert all(Path(page).name in (ROOT / "tests" / where).read_text() for page, where in ELSEWHERE.items())


def test_every_block_names_its_language() -> None:
    for page in USERS:
        for block in blocks(page):
            assert block.language in ("python", "sh", "text", "diff", "yaml", "json"), (
                f"{name_of(page)}:{block.line} is {block.language!r}"
            )
