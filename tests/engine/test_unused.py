"""A training that leaves its exchange out is warned at its own line, once; one that uses it never is."""

from __future__ import annotations

import warnings
from typing import Any

import ddp_run
import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch

import gradcomp
from gradcomp.engine.sessions.unused import SOME

pytestmark = pytest.mark.slow


def warned(train: Any, *args: Any) -> list[tuple[str, bool]]:
    """The texts of warnings that tell of steps without an exchange, and whether each is at the line in this project's tests."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(*args)
    return [
        (str(each.message), "small_net" in each.filename or "ddp_run" in each.filename)
        for each in seen
        if "no gradient was" in str(each.message)
    ]


def by_horovod() -> dict[str, Any]:
    """Make a Compression and do not pass it; then pass it."""
    hvd.init()
    found = {}
    for passed in (False, True):
        model, data = small_net.net(), doors.batches()
        plain = torch.optim.SGD(model.parameters(), 0.02)
        compression = gradcomp.horovod.Compression("topk", doors.named(model, f"{passed}."))
        options = {"compression": compression} if passed else {}
        optimizer = hvd.DistributedOptimizer(plain, doors.named(model, f"{passed}."), **options)
        early = warned(small_net.train, model, optimizer, data, SOME - 1)
        found["passed" if passed else "left out"] = early, warned(small_net.train, model, optimizer, data, SOME + 1)
    return found


def by_ddp() -> dict[str, Any]:
    """Train the model inside, then the DDP model."""
    ranks.join()
    found = {}
    for name in ("left out", "passed"):
        run = ddp_run.DdpRun("topk")
        trained = run.whole if name == "passed" else run.plain
        early = warned(small_net.train, trained, run.optimizer, run.data, SOME - 1)
        found[name] = early, warned(small_net.train, trained, run.optimizer, run.data, SOME + 1)
    return found


@pytest.mark.parametrize("program, remedy", [(by_horovod, "compression=...)"), (by_ddp, "Call the DistributedDataParallel")])
def test_what_is_left_out_is_said(program: Any, remedy: str) -> None:
    for found in ranks.launch(program, 2):
        early, late = found["left out"]
        assert early == []
        ((text, at_the_users_line),) = late
        assert remedy in text and at_the_users_line
        assert found["passed"] == ([], [])


def alone() -> list[Any]:
    hvd.init()
    model = small_net.net()
    compression = gradcomp.horovod.Compression("topk", model.named_parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.02), compression=compression)
    return warned(small_net.train, model, optimizer, doors.batches(), SOME + 1)


def test_alone_there_is_nothing_to_exchange() -> None:
    assert ranks.launch(alone, 1) == [[]]
