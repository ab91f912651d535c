"""A rank whose step fails is refused further steps, no weight changes, and the others fail once it ends."""

from __future__ import annotations

import os
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.slow

SPEC = "topk:ratio=0.05"
both_doors = pytest.mark.parametrize("door", doors.DOORS)
REFUSED = "RuntimeError: gradcomp refuses further steps on this rank, since a step failed in its middle ("


class Run:
    """A model in training."""

    def __init__(self, door: str, name: str):
        self.model, self.data = small_net.net(), doors.batches()
        self.optimizer = doors.sgd(door, self.model, SPEC, prefix=f"{name}/{door}.", bucket_mb=0.015)

    def train(self, steps: int) -> Tensor:
        return small_net.train(self.model, self.optimizer, self.data, steps)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        small_net.backward(self.model, next(self.data))

    def fail(self) -> str:
        """Clip where Horovod's users must not, and catch the error."""
        self.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        return small_net.refused(self.optimizer.step)

    def forget_handles(self) -> None:
        """Clear Horovod's own handles of the step that failed, as its elastic mode does."""
        self.optimizer.load_state_dict(self.optimizer.state_dict())


def caught(run: Run) -> dict[str, Any]:
    """Rank 1 catches an error in its step and goes on."""
    before = small_net.weights(run.model)
    if hvd.rank() == 0:
        return {"said": small_net.refused(lambda: run.train(2)), "kept": True}  # the first one has all that it needs
    found = {"first": run.fail(), "said": small_net.refused(run.optimizer.step)}
    run.forget_handles()
    return found | {
        "next": small_net.refused(lambda: run.train(1)),
        "state": small_net.refused(run.optimizer.compression.state_dict),
        "kept": torch.equal(before, small_net.weights(run.model)),
    }


def alone(door: str) -> None:
    """Train until rank 1 fails. Then report, and end without Horovod, which has operations under way."""
    hvd.init()
    run = Run(door, "alone")
    run.train(3)
    hvd.barrier()
    ranks.report(caught(run))
    os._exit(0)


def together(door: str) -> dict[str, Any]:
    """Load on all ranks in mid-training; and after a failure on all of them."""
    wanted = Run(door, "wanted").train(8)
    reloaded = Run(door, "reloaded")
    reloaded.train(4)
    reloaded.optimizer.compression.load_state_dict(reloaded.optimizer.compression.state_dict())
    failed = Run(door, "failed")
    failed.train(4)
    state, weights = failed.optimizer.compression.state_dict(), small_net.weights(failed.model)
    failed.data, again = iter(batches := [next(failed.data) for _ in range(4)]), batches
    first, second = failed.fail(), small_net.refused(failed.optimizer.step)
    kept = torch.equal(weights, small_net.weights(failed.model))
    failed.forget_handles()
    failed.optimizer.compression.load_state_dict(state)
    failed.data = iter(again)
    running = Run(door, "in a step")
    running.train(2)
    running.backward()
    in_step = small_net.refused(running.optimizer.compression.state_dict)
    running.optimizer.step()
    return {
        "wanted": wanted,
        "reloaded": reloaded.train(4),
        "failed": failed.train(4),
        "said": (first, second),
        "kept": kept,
        "in step": in_step,
    }


def program() -> dict[str, Any]:
    hvd.init()
    return {door: together(door) for door in doors.DOORS}


@ranks.once
def found(door: str) -> list[dict[str, Any]]:
    return ranks.launch(alone, 2, door, seconds=200)


@ranks.once
def found_together() -> list[dict[str, Any]]:
    return ranks.launch(program, 2)


@both_doors
def test_a_caught_error_is_followed_by_refusals(door: str) -> None:
    """Neither the failed step nor a later one applies gradients that were not exchanged."""
    one = found(door)[1]
    assert one["first"].startswith("RuntimeError: the gradient of '"), one
    for call in ("said", "next", "state"):
        assert one[call].startswith(f"{REFUSED}RuntimeError: the gradient of '"), one
        assert "from their last states; or, if the step failed on all ranks, call compression.load_state_dict()" in one[call]
    assert one["kept"]


@both_doors
def test_the_others_fail_once_it_ends(door: str) -> None:
    """With an error that Horovod's elastic mode understands."""
    assert found(door)[0]["said"].startswith("HorovodInternalError: ")


@both_doors
def test_loading_on_all_ranks_in_mid_training_goes_on_to_the_bit(door: str) -> None:
    for own in found_together():
        assert torch.equal(own[door]["reloaded"], own[door]["wanted"])


@both_doors
def test_after_a_failure_on_all_ranks_a_state_from_before_goes_on(door: str) -> None:
    for own in found_together():
        first, second = own[door]["said"]
        assert first.startswith("RuntimeError: the gradient of '") and second.startswith(REFUSED)
        assert own[door]["kept"], "the gradients that were not exchanged changed weights"
        assert torch.equal(own[door]["failed"], own[door]["wanted"])


@both_doors
def test_a_state_in_mid_step_is_refused(door: str) -> None:
    for own in found_together():
        assert own[door]["in step"].startswith("RuntimeError: state_dict() came in the middle of a step: call it after")
