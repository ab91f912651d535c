"""A training that leaves its exchange out is warned at its own line, once; one that uses it never is."""

from __future__ import annotations

import warnings
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
from doors import ALONE, COMPRESSION, DDP, Training
from torch import nn

import gradcomp
from gradcomp.engine.optimizer_steps import STEPS_BEFORE_WARNING

pytestmark = pytest.mark.slow


def warned(run: Training, model: nn.Module, steps: int = STEPS_BEFORE_WARNING + 1) -> list[tuple[str, str]]:
    """Train. Return the warnings that tell of steps without an exchange, and the files that they name."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        small_net.train(model, run.optimizer, run.data, steps)
    return [(str(each.message), each.filename) for each in seen if "no gradient was" in str(each.message)]


def by(door: str) -> dict[str, Any]:
    """Leave the exchange out: train the model inside DDP, or do not pass the Compression to Horovod. Then use it."""
    doors.join(door)
    left_out = Training(DDP if door == DDP else ALONE, spec="topk" if door == DDP else None, prefix="left out.")
    unused = None if door == DDP else gradcomp.horovod.Compression("topk", doors.named(left_out.model, "left out."))
    early = warned(left_out, left_out.model, STEPS_BEFORE_WARNING - 1)
    found = {"early": early, "late": warned(left_out, left_out.model)}
    del unused
    used = Training(door, spec="topk")
    return found | {"used": warned(used, used.whole)}


@pytest.mark.parametrize("door, remedy", [(COMPRESSION, "compression=...)"), (DDP, "Call the DistributedDataParallel")])
def test_an_exchange_that_is_left_out_is_warned_of(door: str, remedy: str) -> None:
    for rank, found in enumerate(ranks.launch(by, 2, door)):
        assert [remedy in text and "small_net" in file for text, file in found["late"]] == [True] * (rank == 0)
        assert found["early"] == found["used"] == []


def in_other_ways() -> dict[str, Any]:
    """Train past the exchange after attach() without a name for its handle, and after a resume; and with a second exchange."""
    ranks.join()
    found = {}
    for name in ("no handle", "resumed"):
        run = Training(DDP, spec="topk")
        if name == "resumed":
            run.train(2)
            state = run.handle.state_dict()
            run = Training(DDP, run.model, "topk")
            run.handle.load_state_dict(state)
        del run.handle
        found[name] = warned(run, run.model)
    first = Training(DDP, spec="sign")
    second = Training(DDP, first.model, "topk")
    return found | {"wrapped again": warned(second, second.whole)}


def test_neither_a_handle_nor_a_fresh_state_is_needed_and_a_second_exchange_is_one() -> None:
    for rank, found in enumerate(ranks.launch(in_other_ways, 2)):
        assert len(found["no handle"]) == len(found["resumed"]) == (rank == 0) and found["wrapped again"] == []


def alone() -> list[Any]:
    hvd.init()
    run = Training(COMPRESSION, spec="topk")
    return warned(run, run.model)


def test_alone_there_is_nothing_to_exchange() -> None:
    assert ranks.launch(alone, 1) == [[]]
