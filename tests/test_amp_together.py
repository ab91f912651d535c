"""Loss scaling, accumulation, a clip and momentum in one training: the weights are those of a computation by hand."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import doors
import known_gradients
import pytest
import ranks
import torch
import torch.distributed as dist
from known_gradients import BUCKET_MB, SHAPES, Model
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.slow

RANKS, STEPS, PASSES, LR, MOMENTUM = 2, 12, 3, 0.1, 0.9
# In place of a clip_grad_norm_ by 20, as the pages say. The gradients' norms are around 21: some are cut.
CLIP = 20.0
SPEC = f"topk:ratio=1,wire=exact,clip={CLIP * math.sqrt(RANKS)},clip_by=model"


def by_ddp() -> dict[str, Tensor]:
    ranks.join()
    model, scaling = Model(dist.get_rank()), known_gradients.scaler(4)
    whole = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    gradcomp.ddp.attach(whole, SPEC, optimizer=optimizer, scaler=scaling)
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(PASSES):
            with whole.no_sync() if i + 1 < PASSES else contextlib.nullcontext():
                scaling.scale(whole(PASSES * step + i) / PASSES).backward()
        scaling.step(optimizer)
        scaling.update()
    return weights(model, scaling)


def by_horovod(door: str) -> dict[str, Tensor]:
    import horovod.torch as hvd

    hvd.init()
    model, scaling = Model(hvd.rank()), known_gradients.scaler(4)
    inner = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    optimizer = doors.wrapped(door, inner, doors.named(model), SPEC, scaler=scaling, backward_passes_per_step=PASSES)
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(PASSES):
            scaling.scale(model(PASSES * step + i) / PASSES).backward()
        optimizer.synchronize()
        scaling.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaling.step(optimizer)
        scaling.update()
    return weights(model, scaling)


def weights(model: Model, scaling: Any) -> dict[str, Tensor]:
    assert scaling.get_scale() == 2.0 ** (16 + STEPS // 4), "the scale was to grow"
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def by_hand() -> tuple[dict[str, Tensor], int]:
    """Train in float64. Return the weights, and how many gradients were cut."""
    found = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    velocity, cut = {name: torch.zeros_like(weight) for name, weight in found.items()}, 0
    for step in range(STEPS):
        mean = {name: torch.zeros_like(weight) for name, weight in found.items()}
        for rank in range(RANKS):
            own = {name: sum(one(name, rank, PASSES * step + i) for i in range(PASSES)) / PASSES for name in SHAPES}
            norm = math.sqrt(sum(float(grad.square().sum()) for grad in own.values()))
            cut += norm > CLIP
            for name, grad in own.items():
                mean[name] += grad * min(1.0, CLIP / norm) / RANKS
        for name in SHAPES:
            velocity[name] = MOMENTUM * velocity[name] + mean[name]
            found[name] -= LR * velocity[name]
    return found, cut


def one(name: str, rank: int, at: int) -> Tensor:
    return known_gradients.gradient(name, rank, at).double()


@pytest.mark.parametrize("door", ["ddp", *doors.DOORS])
def test_scaled_accumulated_and_clipped_steps_are_those_by_hand(door: str) -> None:
    found = ranks.launch(by_ddp, RANKS) if door == "ddp" else ranks.launch(by_horovod, RANKS, door)
    wanted, cut = by_hand()
    assert 0 < cut < RANKS * STEPS
    for own in found:
        for name, weight in wanted.items():
            torch.testing.assert_close(own[name].double(), weight, rtol=1e-4, atol=1e-5)
