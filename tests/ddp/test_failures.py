"""DDP where one rank fails or acts alone: it is refused, and an operation that the ranks do not share ends in a sentence."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import ranks
import small_net
import torch
import torch.distributed as dist
from doors import DDP, Training
from torch import Tensor

import gradcomp

pytestmark = pytest.mark.slow

PARTED = "RuntimeError: the ranks are out of step: "
REFUSED = "RuntimeError: gradcomp refuses further steps on this rank, since a step failed in its middle ("


class Broken(torch.autograd.Function):
    """Raises an error in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise KeyError("forced")


def limit(seconds: int = 3) -> None:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)


def caught(run: Training) -> dict[str, Any]:
    """Rank 1's backward pass fails after some gradients were complete; the rank goes on. Rank 0 waits for its timeout."""
    before = run.weights
    limit()
    if dist.get_rank() == 0:
        return {"said": small_net.refused(lambda: run.train(1)), "kept": torch.equal(before, run.weights)}
    broken = run.model.second.register_forward_hook(lambda module, given, out: Broken.apply(out))
    run.optimizer.zero_grad()
    first = small_net.refused(run.backward)
    broken.remove()
    said = "" if "blocks" in str(run.handle) else small_net.refused(run.optimizer.step)
    return {"first": first, "said": said, "kept": torch.equal(before, run.weights), "state": state(run)}


def state(run: Training) -> str:
    return small_net.refused(run.handle.state_dict)


def recovered(run: Training) -> dict[str, Any]:
    """After rank 1's failure both load, and go on. Where gradients travel, the group has an exchange that it never began."""
    own = run.handle.state_dict()
    caught(run)
    limit(20)
    said = small_net.refused(lambda: run.handle.load_state_dict(own))
    if said != "nothing was raised":
        return {"said": said}
    run.whole = torch.nn.parallel.DistributedDataParallel(run.model)  # DDP does not survive a backward pass that fails
    run.handle = gradcomp.ddp.attach(run.whole, "topk:ratio=0.05")
    run.handle.load_state_dict(own)
    return {"said": said, "weights": run.train(2)}


def gone(run: Training) -> dict[str, Any]:
    """Rank 0 loads, and the other one does not come within the group's timeout."""
    if dist.get_rank() == 1:
        time.sleep(8)
        return {"said": ""}
    limit()
    return {"said": small_net.refused(lambda: run.handle.load_state_dict(run.handle.state_dict()))}


def left_out(run: Training, goes_on: bool = True) -> dict[str, Any]:
    """Rank 1 leaves out a step, and goes on to its next backward pass or does nothing more. Both try another step then."""
    limit()
    run.optimizer.zero_grad()
    run.backward()
    before = run.weights
    if dist.get_rank() == 1 and not goes_on:
        return {"said": ""}
    said = small_net.refused(run.backward if dist.get_rank() == 1 else run.optimizer.step)
    return {"said": said, "kept": torch.equal(before, run.weights), "again": small_net.refused(run.optimizer.step)}


def left_out_at_the_end(run: Training) -> dict[str, Any]:
    return left_out(run, goes_on=False)


def joined_alone(run: Training) -> dict[str, Any]:
    """Rank 1 has no batch at all, and joins at once."""
    limit()
    fresh = Training(DDP, spec="topk:ratio=0.05", bucket_mb=0.02)

    def train() -> None:
        with fresh.whole.join():
            fresh.train(2 if dist.get_rank() == 0 else 0)

    return {"said": small_net.refused(train)}


def died(run: Training) -> dict[str, Any]:
    """Rank 1 ends in mid-training, as one that the system kills, and nothing ends the other one."""
    if dist.get_rank() == 1:
        ranks.report({})
        os._exit(9)
    return {"said": small_net.refused(lambda: run.train(2))}


CASES = {each.__name__: each for each in (died, caught, recovered, gone, left_out, left_out_at_the_end, joined_alone)}


def program(case: str, spec: str) -> None:
    """Train until one rank does something alone. Then report, and end without the group, which has operations under way."""
    ranks.join()
    run = Training(DDP, spec=spec, bucket_mb=0.02)
    run.train(3)
    dist.barrier()
    began = time.monotonic()
    found = CASES[case](run)
    ranks.report(found | {"seconds": time.monotonic() - began})
    ranks.end_together()


@ranks.once
def found(case: str, spec: str = "topk:ratio=0.05") -> list[dict[str, Any]]:
    return ranks.launch(program, 2, case, spec, seconds=200, dies={1: 9} if case == "died" else None)


def test_a_backward_pass_that_fails_ends_the_training_on_all_ranks() -> None:
    """Rank 1 steps with what it has, and the weights of both stay those before the step."""
    for own in found("caught"):
        assert own["said"].startswith(f"{PARTED}rank 0 is in a backward pass after 3 exchanges and rank 1 is in step 4.")
        assert own["kept"] and own["seconds"] < 3
    one = found("caught")[1]
    assert "forced" in one["first"] and one["state"].startswith(f"{REFUSED}{PARTED}")


def test_where_gradients_travel_the_others_end_after_the_groups_timeout() -> None:
    first, one = found("caught", "blocks")
    assert first["said"].startswith("RuntimeError: gradcomp's exchange failed in bucket "), first
    assert first["kept"] and 3 <= first["seconds"] < 20
    assert "forced" in one["first"] and one["state"].startswith("RuntimeError: state_dict() came in the middle of a step")


@pytest.mark.parametrize("spec, place", [("topk:ratio=0.05", "agreement of the ranks"), ("blocks", "bucket ")])
def test_a_rank_whose_exchange_fails_says_what_may_have_happened(spec: str, place: str) -> None:
    (zero,) = found("died", spec)
    assert zero["said"].startswith(f"RuntimeError: gradcomp's exchange failed in {place}"), zero
    assert "a rank ended or raised an error (see its output)" in zero["said"] and zero["seconds"] < 20, zero


def test_exchanges_that_nobody_will_finish_are_named_on_all_ranks() -> None:
    """Otherwise the next exchange of one rank would meet the last one of the other, and gloo would abort."""
    for own in found("recovered", "blocks"):
        assert own["said"].startswith("RuntimeError: a step failed on some ranks only, and the group has exchanges that "), own


def test_ranks_that_have_parted_go_on_from_a_state() -> None:
    first, second = found("recovered")
    assert first["said"] == second["said"] == "nothing was raised"
    assert torch.equal(first["weights"], second["weights"])


def test_a_rank_that_does_not_come_is_named_after_the_groups_timeout() -> None:
    zero, _ = found("gone")
    assert zero["said"].startswith("RuntimeError: ranks 1 have not come to the meeting that all ranks call within the group's")
    assert 3 <= zero["seconds"] < 6


def test_a_step_that_one_rank_leaves_out_is_named_on_all_ranks() -> None:
    for own in found("left_out"):
        assert own["said"].startswith(f"{PARTED}rank 0 is in step 4 and rank 1 is in a backward pass after 3 exchanges.")
        assert '"blocks"' in own["said"] and own["again"].startswith(REFUSED)
        assert own["kept"] and own["seconds"] < 3


def test_a_last_step_that_one_rank_leaves_out_ends_after_the_groups_timeout() -> None:
    zero, _ = found("left_out_at_the_end")
    assert zero["said"].startswith("RuntimeError: gradcomp's exchange failed in agreement of the ranks")
    assert zero["kept"] and 3 <= zero["seconds"] < 6


def test_a_rank_without_any_batch_says_what_it_cannot_know() -> None:
    zero, one = found("joined_alone")
    assert one["said"].startswith("RuntimeError: this rank has joined without a step of its own"), one
    assert zero["said"].startswith("RuntimeError: "), zero
