"""Clips between backward() and step(), wherever loops have them: each rank cuts its own gradients, as without gradcomp."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import doors
import pytest
import ranks
import torch
from doors import DDP, DOORS, EVERY, Training
from torch import Tensor, nn

pytestmark = pytest.mark.slow

RANKS, STEPS, BOUND = 2, 12, 3.0
NORMS = 2.0, 2.8, 2.8, 64.0, 1.0, 8.0, 0.5, 16.0
SPEC = "topk:ratio=1,wire=exact"
SHAPES = (30, 20), (7,), (5, 4)


class Three(nn.Module):
    """Three layers that compute nothing: the gradient of the loss is what is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)

    def forward(self, given: list[Tensor]) -> Tensor:
        return torch.stack([(own * each).sum() for own, each in zip(self.layers, given, strict=True)]).sum()


def gradients(step: int, rank: int) -> list[Tensor]:
    """Draw gradients with these norms, about: some are longer than the bound."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [NORMS[step % len(NORMS)] * torch.randn(shape, generator=generator) / 25 for shape in SHAPES]


def sgd(parameters: Any, decay: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=decay)


def by_norm(model: nn.Module, bound: float = BOUND) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), bound)


def by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.05)


def by_weights(model: nn.Module) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad *= min(1.0, 0.05 * float(each.detach().norm()) / (float(each.grad.norm()) + 1e-6))


def to_signs(model: nn.Module) -> None:
    """Give the layers other gradients than those of the backward pass."""
    for each in model.parameters():
        assert each.grad is not None
        each.grad = each.grad.sign()


CLIPS: dict[str, Callable[[nn.Module], None]] = {each.__name__: each for each in (by_norm, by_value, by_weights, to_signs)}
# By which door, which clip, whether Horovod has waited before it, and whether the gradients have a loss scale.
CASES = [(door, clip, False, False) for door in EVERY for clip in CLIPS]
CASES += [(DDP, "by_norm", False, True), *((door, "by_norm", True, scales) for door in DOORS for scales in (False, True))]


def by_hand(clip: Callable[[nn.Module], None]) -> list[Tensor]:
    """Train by SGD on the mean of gradients that each rank has clipped by itself."""
    model, own = Three(), [Three() for _ in range(RANKS)]
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        for rank, each in enumerate(own):
            each.load_state_dict(model.state_dict())
            each.zero_grad()
            each(gradients(step, rank)).backward()
            clip(each)
        for parameter, *parts in zip(model.parameters(), *(each.parameters() for each in own), strict=True):
            parameter.grad = torch.stack([part.grad for part in parts]).mean(0)  # type: ignore[misc]
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def train(door: str, clip: Callable[[nn.Module], None], waits: bool, scales: bool) -> list[Tensor]:
    """Train on this rank's own gradients. waits: synchronize() before the clip, as Horovod's documentation says."""
    model = Three()
    run = Training(door, model, SPEC, inner=sgd(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=scales)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        scaler.scale(run.whole(gradients(step, doors.rank(door)))).backward()
        if waits:
            run.optimizer.synchronize()
        scaler.unscale_(run.optimizer)
        clip(model)
        with run.optimizer.skip_synchronize() if waits else contextlib.nullcontext():
            scaler.step(run.optimizer)
        scaler.update()
    return [each.detach().clone() for each in model.parameters()]


def train_by_shares(door: str) -> list[Tensor]:
    """Train by the sum of the ranks' clipped gradients, each its share of them."""
    import horovod.torch as hvd

    model = Three()
    run = Training(door, model, SPEC, inner=sgd(model.parameters(), 1e-3 / RANKS), op=hvd.Sum)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.whole([each / RANKS for each in gradients(step, hvd.rank())]).backward()
        by_norm(model, BOUND / RANKS)
        run.optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def program(door: str) -> dict[Any, Any]:
    """Train in every way. A warning of gradcomp's is an error: no clip is odd."""
    doors.join(door)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gradcomp")
        found: dict[Any, Any] = {case: train(door, CLIPS[case[1]], *case[2:]) for case in CASES if case[0] == door}
        return found | ({"shares": train_by_shares(door)} if door != DDP else {})


@ranks.once
def found(door: str) -> list[dict[Any, Any]]:
    return ranks.launch(program, RANKS, door)


def check(door: str, case: Any, clip: str) -> None:
    wanted = by_hand(CLIPS[clip])
    for own in found(door):
        torch.testing.assert_close(own[case], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_rank_clips_its_own_gradient(case: tuple[str, str, bool, bool]) -> None:
    """Before Horovod has waited or after it, and of gradients with a loss scale that grows."""
    check(case[0], case, case[1])


@pytest.mark.parametrize("door", DOORS)
def test_a_clip_of_shares_of_a_sum_is_that_of_the_mean(door: str) -> None:
    check(door, "shares", "by_norm")
