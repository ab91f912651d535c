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
from gradcomp.engine.optimizer_steps import STEPS_BEFORE_WARNING

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
        counts = STEPS_BEFORE_WARNING - 1, STEPS_BEFORE_WARNING + 1
        found["passed" if passed else "left out"] = [warned(small_net.train, model, optimizer, data, each) for each in counts]
    return found


def by_ddp() -> dict[str, Any]:
    """Train the model inside, then the DDP model."""
    ranks.join()
    found = {}
    for name in ("left out", "passed"):
        run = ddp_run.DdpRun("topk")
        trained = run.whole if name == "passed" else run.plain
        early = warned(small_net.train, trained, run.optimizer, run.data, STEPS_BEFORE_WARNING - 1)
        found[name] = early, warned(small_net.train, trained, run.optimizer, run.data, STEPS_BEFORE_WARNING + 1)
    return found


def in_other_ways() -> dict[str, Any]:
    """Train past the exchange after attach() without a name for its handle, and after a resume; and with a second exchange."""
    ranks.join()
    found = {}
    for name in ("no handle", "resumed"):
        run = ddp_run.DdpRun("topk")
        if name == "resumed":
            run.train(2)
            state = run.handle.state_dict()
            run = ddp_run.DdpRun("topk", run.plain)
            run.handle.load_state_dict(state)
        del run.handle
        found[name] = warned(small_net.train, run.plain, run.optimizer, run.data, STEPS_BEFORE_WARNING + 1)
    first = ddp_run.DdpRun("sign")
    second = ddp_run.DdpRun("topk", first.plain)
    found["wrapped again"] = warned(second.train, STEPS_BEFORE_WARNING + 1)
    return found


def test_neither_a_handle_nor_a_fresh_state_is_needed_and_a_second_exchange_is_one() -> None:
    for found in ranks.launch(in_other_ways, 2):
        assert len(found["no handle"]) == len(found["resumed"]) == 1 and found["wrapped again"] == []


@pytest.mark.parametrize("program, remedy", [(by_horovod, "compression=...)"), (by_ddp, "Call the DistributedDataParallel")])
def test_what_is_left_out_is_said(program: Any, remedy: str) -> None:
    for found in ranks.launch(program, 2):
        early, late = found["left out"]
        assert early == []
        ((text, at_the_users_line),) = late
        assert remedy in text and at_the_users_line
        assert list(found["passed"]) == [[], []]


def alone() -> list[Any]:
    hvd.init()
    model = small_net.net()
    compression = gradcomp.horovod.Compression("topk", model.named_parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.02), compression=compression)
    return warned(small_net.train, model, optimizer, doors.batches(), STEPS_BEFORE_WARNING + 1)


def test_alone_there_is_nothing_to_exchange() -> None:
    assert ranks.launch(alone, 1) == [[]]
