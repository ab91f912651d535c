"""Gradients that are kept after a step, so that the next backward pass adds to them: trainings are those of torch alone."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import doors
import pytest
import ranks
import torch
from doors import DDP, OWN
from one_rank import SPEC, Body, Run, accumulate_alone, adamw, both, plain, same, sgd
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("group_of_one")


def train(run: Run, step: int) -> list[nn.Parameter]:
    run.loss(step).backward()
    run.optimizer.step()
    return [*run.model.parameters()]


def every_second(run: Run, step: int) -> None:
    train(run, step)
    if step % 2:
        run.optimizer.zero_grad()


def every_fourth(run: Run, step: int) -> None:
    for each in train(run, step):
        if step % 4 == 3:
            each.grad = None


def by_half(run: Run, step: int) -> None:
    for each in train(run, step):
        each.grad.mul_(0.5)  # type: ignore[union-attr]


def one_layer(run: Run, step: int) -> None:
    """Forget a layer in a loop of the user's own."""
    for each in train(run, step)[1:]:
        each.grad = None


def between(run: Run, step: int) -> None:
    """Set gradients to zero between forward and backward in every second step."""
    loss = run.loss(step)
    if step % 2:
        run.optimizer.zero_grad(set_to_none=step % 4 == 1)
    loss.backward()
    run.optimizer.step()


def in_two_passes(run: Run, step: int) -> None:
    with run.whole.no_sync():
        run.loss(2 * step).backward()
    every_second(run, 2 * step + step % 2)


@both
@pytest.mark.parametrize("body", [every_second, every_fourth, by_half, one_layer, between, in_two_passes])
def test_a_training_that_keeps_gradients_is_torchs(optimizer_of: Any, body: Body) -> None:
    same(lambda spec: Run(optimizer_of, spec).on(range(24), body))
    if body is every_second:
        same(lambda spec: Run(optimizer_of, spec, gradient_as_bucket_view=True).on(range(24), body))


@both
def test_gradients_that_are_kept_are_without_the_loss_scale(optimizer_of: Any) -> None:
    def training(spec: str | None) -> Run:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        run = Run(optimizer_of, spec, scaler=scaler)
        for step in range(12):
            scaler.scale(run.loss(step)).backward()
            scaler.step(run.optimizer)
            scaler.update()
            for each in run.model.parameters():
                each.grad.mul_(300)  # type: ignore[union-attr]
        return run

    same(training)


def to_none(run: Run, parameters: list[nn.Parameter]) -> None:
    run.optimizer.zero_grad()


def to_zero(run: Run, parameters: list[nn.Parameter]) -> None:
    run.optimizer.zero_grad(set_to_none=False)


def one_by_one(run: Run, parameters: list[nn.Parameter]) -> None:
    for each in parameters:
        each.grad.zero_()  # type: ignore[union-attr]


def by_data(run: Run, parameters: list[nn.Parameter]) -> None:
    for each in parameters:
        each.grad.data.zero_()  # type: ignore[union-attr]


def together(run: Run, parameters: list[nn.Parameter]) -> None:
    torch._foreach_zero_([each.grad for each in parameters])


def anew(run: Run, parameters: list[nn.Parameter]) -> None:
    for each in parameters:
        each.grad = torch.zeros_like(each)


@both
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("clear", [to_none, to_zero, one_by_one, by_data, together, anew])
def test_cleared_gradients_are_not_kept(optimizer_of: Any, clear: Callable[..., None], between: bool) -> None:
    """between: they are cleared between the forward and the backward pass."""

    def body(run: Run, step: int) -> None:
        loss, parameters = run.loss(step), [*run.model.parameters()]
        if between and step:
            clear(run, parameters)
        loss.backward()
        run.optimizer.step()
        between or clear(run, parameters)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Run(optimizer_of, "topk:ratio=0.2").on(range(24), body).on(range(3), accumulate_alone)
    assert not run.handle._session.last._kept.is_kept


@both
def test_gradients_that_are_first_kept_late_are_warned_of_once(optimizer_of: Any) -> None:
    def body(run: Run, step: int) -> None:
        if run.handle is None and step == 12:
            run.optimizer.zero_grad()
        (plain if step < 12 else every_second)(run, step)

    with pytest.warns(UserWarning, match="gradients of an earlier step were still there when a backward pass") as seen:
        same(lambda spec: Run(optimizer_of, spec).on(range(24), body))
    assert len(seen) == 1 and seen[0].filename == __file__


class Given(nn.Module):
    """Parameters that compute nothing: the gradient of the loss is what is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(4))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.a * a).sum() + (self.b * b).sum()


def on_ranks(door: str | None, made: Any, bound: float | None) -> Tensor:
    """Train by a door, or on all ranks' gradients by torch alone, and keep 0.7 of each gradient.

    bound: of a clip; all ranks have one gradient then.
    """
    model = Given()
    run = None if door is None else doors.Training(door, model, SPEC, inner=made(model.parameters()))
    optimizer = made(model.parameters()) if run is None else run.optimizer
    for step in range(24):
        for rank in range(2) if run is None else [doors.rank(run.door)]:
            generator = torch.Generator().manual_seed(2 * step + (rank if bound is None else 0))
            given = [torch.randn(each.shape, generator=generator) * (1 if step < 8 else 3) for each in model.parameters()]
            loss = (model if run is None else run.whole)(*given)
            (loss / 2 if run is None else loss).backward()
        with contextlib.nullcontext() if door in (None, DDP) else synchronized(optimizer):
            if bound is not None:
                nn.utils.clip_grad_norm_(model.parameters(), bound)
            optimizer.step()
        for each in model.parameters():
            each.grad.mul_(0.7)  # type: ignore[union-attr]
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@contextlib.contextmanager
def synchronized(optimizer: Any) -> Iterator[None]:
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        yield


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.02, momentum=0.9)


# A clip is seen in updates, before a gradient is longer.
CASES = ("sgd", sgd, None), ("clipped", plain_sgd, 10.0), ("adamw", adamw, 4.2)


def program(door: str) -> dict[str, Tensor]:
    doors.join(door)
    warnings.simplefilter("ignore")
    return {name: on_ranks(door, made, bound) for name, made, bound in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("door", [DDP, OWN])
def test_on_two_ranks_a_training_that_keeps_gradients_is_torchs(door: str) -> None:
    for own in ranks.launch(program, 2, door):
        for name, made, bound in CASES:
            torch.testing.assert_close(own[name], on_ranks(None, made, bound), rtol=1e-4, atol=1e-5)


def test_a_pass_that_is_dropped_may_add_to_gradients_of_an_earlier_step() -> None:
    """A GAN's generator begins to train late: its loss goes through the discriminator, and nobody applies that."""

    def body(run: Run, step: int) -> None:
        plain(run, step)
        if step > 12:
            run.loss(step).backward()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Run(adamw, "topk:ratio=0.2").on(range(20), body)
    assert not any("an earlier step" in str(each.message) for each in seen)
