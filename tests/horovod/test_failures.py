"""A rank whose step fails is refused further steps; where a rank ends or leaves, the others are told within seconds."""

from __future__ import annotations

import os
import time
from typing import Any

import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from doors import COMPRESSION, DOORS, OWN, Training

pytestmark = pytest.mark.slow

both_doors = pytest.mark.parametrize("door", DOORS)
BROKEN = "a kernel failed"
REFUSED = "RuntimeError: gradcomp refuses further steps on this rank, since a step failed in its middle ("


def made(door: str, spec: str = "topk:ratio=0.05") -> Training:
    return Training(door, spec=spec, bucket_mb=0.015)


def fail(run: Training) -> str:
    """Fail in the middle of an exchange, and catch the error."""

    def broken(*arguments: Any) -> None:
        raise RuntimeError(BROKEN)

    run.optimizer.zero_grad()
    run.backward()
    reducer = run.handle._session.reducer
    reducer.advance = broken
    said = small_net.refused(run.optimizer.step)
    del reducer.advance
    return said


def forget_handles(run: Training) -> None:
    """Clear Horovod's own handles of the step that failed, as its elastic mode does."""
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def caught(run: Training) -> dict[str, Any]:
    """Rank 1 catches an error in its step and goes on."""
    before = run.weights
    if hvd.rank() == 0:
        return {"said": small_net.refused(lambda: run.train(2))}  # the first one has all that it needs
    found = {"first": fail(run), "said": small_net.refused(run.optimizer.step)}
    forget_handles(run)
    return found | {
        "next": small_net.refused(lambda: run.train(1)),
        "state": small_net.refused(run.handle.state_dict),
        "kept": torch.equal(before, run.weights),
    }


def joins(run: Training) -> dict[str, Any]:
    """Rank 1 leaves by hvd.join()."""
    said = small_net.refused(hvd.join if hvd.rank() == 1 else lambda: run.train(100))
    if hvd.rank() != 1 and said == "nothing was raised":
        hvd.join()
    return {"said": said}


def dies(run: Training) -> dict[str, Any]:
    if hvd.rank() == 1:
        os._exit(3)
    return {"said": small_net.refused(lambda: run.train(100))}


def leaves_out(run: Training) -> dict[str, Any]:
    """Rank 1 leaves out a step after synchronize(), as a guard of its own does. Before, both have done so together."""

    def train() -> None:
        run.optimizer.zero_grad()
        run.backward()
        run.optimizer.synchronize()

    train()
    train()
    with run.optimizer.skip_synchronize():
        return {"said": small_net.refused(run.optimizer.step if hvd.rank() == 0 else train)}


def sleeps(run: Training) -> dict[str, Any]:
    """Rank 1 lives, and takes no step for longer than Horovod's limit."""
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "2"
    if hvd.rank() == 1:
        time.sleep(5)
        return {"said": ""}
    return {"said": small_net.refused(lambda: run.train(1))}


CASES = {"caught": caught, "joins": joins, "dies": dies, "leaves_out": leaves_out, "sleeps": sleeps}


def program(case: str, door: str, spec: str) -> None:
    """Train until rank 1 does something alone. Report what each rank is told, and when."""
    hvd.init()
    run = made(door, spec)
    run.train(3)
    hvd.barrier()
    start = time.monotonic()
    found = CASES[case](run)
    ranks.report(found | {"seconds": time.monotonic() - start})
    if case != "caught":
        time.sleep(1)  # the others could take a rank's end for the error, and some do not hear of it before
    os._exit(0)  # Horovod is broken and cannot be shut down


@ranks.once
def found(case: str, door: str, spec: str = "topk:ratio=0.05") -> list[dict[str, Any]]:
    is_dead = case == "dies"
    return ranks.launch(program, 2 + is_dead, case, door, spec, seconds=100, dies={1: 3} if is_dead else None)


@both_doors
def test_a_caught_error_is_followed_by_refusals(door: str) -> None:
    """Neither the failed step nor a later one moves weights by what was not exchanged."""
    one = found("caught", door)[1]
    assert one["first"] == f"RuntimeError: {BROKEN}", one
    for call in ("said", "next", "state"):
        assert one[call].startswith(f"{REFUSED}RuntimeError: {BROKEN})"), one
        assert "from their last states; or, if the step failed on all ranks, call compression.load_state_dict()" in one[call]
    assert one["kept"]


@both_doors
def test_the_others_fail_once_it_ends(door: str) -> None:
    """With an error that Horovod's elastic mode understands."""
    assert found("caught", door)[0]["said"].startswith("HorovodInternalError: ")


@both_doors
def test_a_rank_that_dies_ends_the_step_of_the_others(door: str) -> None:
    for rank in found("dies", door):
        assert rank["said"].startswith("HorovodInternalError: "), rank
        assert rank["seconds"] < 45  # the broken connection is seen at once, or Horovod's 30 s for gloo end the step


@both_doors
def test_a_rank_that_leaves_out_a_step_is_named_on_all(door: str) -> None:
    """Also where Horovod itself would wait for ever for the gradients of the next pass."""
    for rank in found("leaves_out", door):
        assert (
            "the ranks are out of step: rank 0 is in step 4 and rank 1 is in a backward pass after 3 exchanges" in rank["said"]
        )


@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "blocks"])
def test_a_wait_ends_by_horovods_limit(spec: str) -> None:
    first, _ = found("sleeps", OWN, spec)
    assert "no answer from the other ranks within the 2 s of HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in first["said"], first
    assert first["said"].startswith("HorovodInternalError: ") and first["seconds"] < 5


@pytest.mark.parametrize("door, spec", [(COMPRESSION, "topk:ratio=0.01"), (OWN, "topk:ratio=0.01"), (COMPRESSION, "dense")])
def test_join_is_named_among_the_causes(door: str, spec: str) -> None:
    """hvd.join() on one rank while another trains: no gather can take part in it, and no carrier comes back right."""
    said = found("joins", door, spec)[0]["said"]
    assert said.startswith("HorovodInternalError: "), said
    ours = "gradcomp's exchange failed" in said
    # With carriers Horovod itself may be the first to meet the broken network, at a carrier.
    assert ours or door == COMPRESSION, said
    assert not ours or "hvd.join()" in said, said


def test_a_dense_exchange_without_carriers_goes_on_when_a_rank_joins() -> None:
    """It is an allreduce, to which Horovod adds zeros for a rank that joined: as in Horovod's own training."""
    assert [rank["said"] for rank in found("joins", OWN, "dense")] == ["nothing was raised"] * 2


def together() -> dict[str, Any]:
    """Fail on all ranks, load the state from before, and go on; beside a training that never failed."""
    hvd.init()
    found = {}
    for door in DOORS:
        undisturbed, run = made(door), made(door)
        run.train(4)
        state, weights = run.handle.state_dict(), run.weights
        again = [next(run.data) for _ in range(4)]
        run.data = iter(again)
        said = fail(run), small_net.refused(run.optimizer.step)
        kept = torch.equal(weights, run.weights)
        forget_handles(run)
        run.handle.load_state_dict(state)
        run.data = iter(again)
        found[door] = {"said": said, "kept": kept, "weights": (run.train(4), undisturbed.train(8))}
    return found


outcomes = ranks.once(lambda: ranks.launch(together, 2))


@both_doors
def test_after_a_failure_on_all_ranks_a_state_from_before_goes_on(door: str) -> None:
    for own in outcomes():
        first, second = own[door]["said"]
        assert first == f"RuntimeError: {BROKEN}" and second.startswith(REFUSED)
        assert own[door]["kept"], "what was not exchanged moved weights"
        assert torch.equal(*own[door]["weights"])
