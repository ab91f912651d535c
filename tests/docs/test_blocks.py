"""Every Python block of the pages runs on two real ranks, with Horovod and torch.distributed, in the order of its page."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from documents import ROOT, USERS, Block, blocks, name_of
from ranks import join, launch

# Pages whose code runs elsewhere.
ELSEWHERE = {
    "docs/start-ddp.md": "test_tutorials.py runs it by torchrun",
    "docs/start-horovod.md": "test_tutorials.py runs it by horovodrun",
}
# Pages whose blocks show one thing after the other, each with a model of its own.
APART = {"docs/training.md"}
# Pages that take a door as given.
DOORS = {"docs/training.md": "horovod", "docs/checkpoints.md": "ddp", "docs/telemetry.md": "ddp"}

CODE = {name_of(page): found for page in USERS if (found := [block for block in blocks(page) if block.language == "python"])}


def run(page: str, found: list[Block], folder: str) -> int:
    """Run a page's blocks on this rank. Return how many there were."""
    import horovod.torch as hvd
    import torch.distributed as dist
    from assumed import Assumed, makers

    hvd.init()
    join()
    os.chdir(folder)
    names = Assumed(makers(DOORS.get(page, "")))
    for block in found:
        if page in APART:
            names = Assumed(makers(DOORS.get(page, "")))
        code = compile("\n" * (block.line - 1) + block.text, page, "exec")
        exec(code, names)
        dist.barrier()  # the next block may read what all ranks have written
    return len(found)


@pytest.mark.parametrize("page", [page for page in CODE if page not in ELSEWHERE])
def test_blocks_run(page: str, tmp_path: Path) -> None:
    assert launch(run, 2, page, CODE[page], str(tmp_path)) == [len(CODE[page])] * 2


def test_the_exceptions_are_pages_with_code() -> None:
    assert {*ELSEWHERE, *APART, *DOORS} <= CODE.keys()
    tutorials = (ROOT / "tests" / "docs" / "test_tutorials.py").read_text()
    assert all(Path(page).name in tutorials for page in ELSEWHERE)


def test_every_block_names_its_language() -> None:
    for page in USERS:
        for block in blocks(page):
            assert block.language in ("python", "sh", "text", "yaml", "json"), (
                f"{name_of(page)}:{block.line} is {block.language!r}"
            )
