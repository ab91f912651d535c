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

pytestmark = pytest.mark.slow

REFUSED = "RuntimeError: gradcomp refuses further steps on this rank, since a step failed in its middle ("


class Broken(torch.autograd.Function):
    """Raises an error in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise KeyError("forced")


def caught(run: Training) -> dict[str, Any]:
    """Rank 1's backward pass fails after some gradients were exchanged; the rank goes on. Rank 0 waits for its timeout."""
    before = run.weights
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    if dist.get_rank() == 0:
        return {"said": small_net.refused(lambda: run.train(1)), "kept": True}
    broken = run.model.second.register_forward_hook(lambda module, given, out: Broken.apply(out))
    run.optimizer.zero_grad()
    first = small_net.refused(run.backward)
    broken.remove()
    said = small_net.refused(run.optimizer.step)
    return {"first": first, "said": said, "kept": torch.equal(before, run.weights), "state": state(run)}


def state(run: Training) -> str:
    return small_net.refused(run.handle.state_dict)


def recovered(run: Training) -> dict[str, Any]:
    """After rank 1's failure both load. The group has an exchange that rank 1 never began."""
    own = run.handle.state_dict()
    caught(run)
    return {"said": small_net.refused(lambda: run.handle.load_state_dict(own))}


def gone(run: Training) -> dict[str, Any]:
    """Rank 0 loads, and the other one does not come within the group's timeout."""
    if dist.get_rank() == 1:
        time.sleep(8)
        return {"said": ""}
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    return {"said": small_net.refused(lambda: run.handle.load_state_dict(run.handle.state_dict()))}


def died(run: Training) -> dict[str, Any]:
    """Rank 1 ends in mid-training, as one that the system kills, and nothing ends the other one."""
    if dist.get_rank() == 1:
        ranks.report({})
        os._exit(9)
    return {"said": small_net.refused(lambda: run.train(2))}


CASES = {"died": died, "caught": caught, "recovered": recovered, "gone": gone}


def program(case: str) -> None:
    """Train until one rank does something alone. Then report, and end without the group, which has operations under way."""
    ranks.join()
    run = Training(DDP, spec="topk:ratio=0.05", bucket_mb=0.02)
    run.train(3)
    dist.barrier()
    began = time.monotonic()
    found = CASES[case](run)
    ranks.report(found | {"seconds": time.monotonic() - began})
    ranks.end_together()


@ranks.once
def found(case: str) -> list[dict[str, Any]]:
    return ranks.launch(program, 2, case, seconds=200, dies={1: 9} if case == "died" else None)


def test_a_backward_pass_that_fails_is_followed_by_refusals() -> None:
    one = found("caught")[1]
    assert "forced" in one["first"]
    assert one["said"].startswith("RuntimeError: backward() ended before all gradients were exchanged: layers that are frozen")
    assert one["state"].startswith(f"{REFUSED}RuntimeError: backward() ended before")
    assert one["kept"], "gradients of this rank alone changed weights"


def test_the_others_end_after_the_groups_timeout() -> None:
    first = found("caught")[0]
    assert first["said"].startswith("RuntimeError: gradcomp's exchange failed in bucket "), first
    assert 3 <= first["seconds"] < 20


def test_a_rank_whose_exchange_fails_says_what_may_have_happened() -> None:
    (zero,) = found("died")
    assert zero["said"].startswith("RuntimeError: gradcomp's exchange failed in bucket "), zero
    assert "a rank ended or raised an error (see its output)" in zero["said"] and zero["seconds"] < 20, zero


def test_exchanges_that_nobody_will_finish_are_named_on_all_ranks() -> None:
    """Otherwise the next exchange of one rank would meet the last one of the other, and gloo would abort."""
    for own in found("recovered"):
        assert own["said"].startswith("RuntimeError: a step failed on some ranks only, and the group has exchanges that "), own


def test_a_rank_that_does_not_come_is_named_after_the_groups_timeout() -> None:
    zero, _ = found("gone")
    assert zero["said"].startswith("RuntimeError: ranks 1 have not come to the meeting that all ranks call within the group's")
    assert 3 <= zero["seconds"] < 6
