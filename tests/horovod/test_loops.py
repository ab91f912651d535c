"""Training loops under Horovod: its own lines for a clip under a scaler, overflows, and a step that was cut short."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from doors import ALONE, DOORS, Training
from torch import Tensor, nn
from torch.nn import functional

pytestmark = pytest.mark.slow

STEPS, LIMIT, SCALE = 5, 0.5, 1024.0
both_doors = pytest.mark.parametrize("door", DOORS)


def clipped(door: str) -> Tensor:
    """Unscale, clip and step as Horovod's documentation says."""
    run, scaler = Training(door, spec="dense"), torch.amp.GradScaler("cpu", init_scale=SCALE)
    for _ in range(STEPS):
        run.optimizer.zero_grad()
        x, y = next(run.data)
        scaler.scale(functional.cross_entropy(run.model(x), y)).backward()
        run.optimizer.synchronize()
        scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), LIMIT)
        with run.optimizer.skip_synchronize():
            scaler.step(run.optimizer)
        scaler.update()
    return run.weights


def overflowing(door: str, spec: str) -> dict[str, Tensor]:
    """Give rank 1 alone a gradient that is not finite."""
    run = Training(door, spec=spec, momentum=0.9)
    for step in range(4):
        run.optimizer.zero_grad()
        x, y = next(run.data)
        loss = functional.cross_entropy(run.model(x), y)
        (loss * (float("inf") if step == 2 and hvd.rank() else 1.0)).backward()
        run.optimizer.step()
    return {"weights": run.weights, "residual": torch.cat([*map(torch.flatten, run.residual().values())])}


def cut_short(door: str) -> list[str]:
    """Fail outside of gradcomp between backward() and step(), begin anew as Horovod's elastic recovery does, and go on."""
    run = Training(door, spec="topk:ratio=0.05")
    run.train(3)
    state = run.optimizer.state_dict()
    run.optimizer.zero_grad()
    run.backward()
    hvd.barrier()
    ranks.start_anew()
    run.optimizer.load_state_dict(state)
    return [small_net.refused(lambda: run.train(1)) for _ in range(2)]


def program() -> dict[Any, Any]:
    hvd.init()
    found: dict[Any, Any] = {("dense", door): clipped(door) for door in (ALONE, *DOORS)}
    found |= {("overflow", door, spec): overflowing(door, spec) for door in DOORS for spec in ("topk:ratio=0.05", "blocks")}
    hvd.barrier()
    ranks.start_anew()
    return found | {("cut short", door): cut_short(door) for door in DOORS}


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch(program, 2, anew=3)


@both_doors
def test_horovods_own_lines_train_as_horovod_alone_does(door: str) -> None:
    """Rounding: Horovod's sums of two float32 gradients, and ours, divided and scaled in another order."""
    for own in found():
        torch.testing.assert_close(own["dense", door], own["dense", ALONE], rtol=1e-5, atol=1e-7)


@both_doors
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "blocks"])
def test_without_a_scaler_an_overflow_of_one_rank_reaches_the_weights_of_all(spec: str, door: str) -> None:
    for own in found():
        kept = own["overflow", door, spec]
        assert not kept["weights"].isfinite().all() and kept["residual"].isfinite().all()


@both_doors
def test_a_step_that_was_cut_short_is_forgotten(door: str) -> None:
    for own in found():
        assert own["cut short", door] == ["nothing was raised"] * 2
