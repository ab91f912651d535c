"""momentum=auto where updates are not applied as they were made: each use is right, or refused by name."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from one_rank import SPEC, Body, adamw, loss, net, plain, same, sgd, train
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.usefixtures("group_of_one")
both = pytest.mark.parametrize("optimizer_of", [sgd, adamw])


@both
def test_a_training_alone_is_torchs_own(optimizer_of: Any) -> None:
    same(optimizer_of, plain)


def accumulate(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    for part in range(2):
        (loss(model, 2 * step + part) / 2).backward()
    optimizer.step()


def accumulate_alone(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    with model.no_sync():
        (loss(model, 2 * step) / 2).backward()
    (loss(model, 2 * step + 1) / 2).backward()
    optimizer.step()


def drop(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss(model, step).backward()
    if step % 3:
        optimizer.step()


@both
@pytest.mark.parametrize("body", [accumulate, drop])
def test_an_update_that_is_not_applied_is_refused(optimizer_of: Any, body: Body) -> None:
    with pytest.raises(RuntimeError, match=r"has not applied the last one's update.*no_sync\(\).*momentum=0"):
        train(SPEC, optimizer_of, body)


@both
@pytest.mark.parametrize("body", [accumulate, drop])
def test_gradients_may_be_accumulated_and_dropped(optimizer_of: Any, body: Body) -> None:
    same(optimizer_of, body, f"{SPEC},momentum=0")


@both
def test_gradients_are_accumulated_without_exchanges(optimizer_of: Any) -> None:
    same(optimizer_of, accumulate_alone)


@both
def test_a_closure_is_refused(optimizer_of: Any) -> None:
    def body(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
        plain(model, optimizer, step)
        optimizer.step(lambda: 0.0)  # type: ignore[arg-type, return-value]

    with pytest.raises(RuntimeError, match=r"step\(closure\) cannot work with momentum=auto"):
        train(SPEC, optimizer_of, body)


class SignAdam(torch.optim.Adam):
    """A subclass that steps in its own way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


class Renamed(torch.optim.AdamW):
    """A subclass that steps as its base does."""


def test_a_subclass_with_its_own_step_gets_gradients() -> None:
    same(lambda parameters: SignAdam(parameters, 0.01), plain)
    *_, handle = train(SPEC, lambda parameters: SignAdam(parameters, 0.01), plain)
    assert "adam" not in handle.state_dict()["of_rank"]["0"]["layers"]
    *_, handle = train(SPEC, lambda parameters: Renamed(parameters, 0.01), plain)
    assert handle.state_dict()["of_rank"]["0"]["layers"]["adam"]["second"]


@both
def test_a_change_between_exchange_and_step_is_refused(optimizer_of: Any) -> None:
    model, optimizer, handle = train(SPEC, optimizer_of, plain, steps=3)
    wrapped = DistributedDataParallel(model)
    handle = gradcomp.ddp.attach(wrapped, SPEC, optimizer=optimizer)
    loss(wrapped, 3).backward()
    with pytest.raises(RuntimeError, match=r"change\(\) came between an exchange and optimizer.step\(\)"):
        handle.change(f"{SPEC},momentum=0")
    optimizer.step()
    handle.change(f"{SPEC},momentum=0")


@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_of_another_kind_is_refused(given: bool) -> None:
    def body(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
        acting = optimizer if step < 4 else made.setdefault(step > 3, adamw(model.parameters()))
        plain(model, acting, step)

    made: dict[bool, torch.optim.Optimizer] = {}
    with pytest.raises(RuntimeError, match=r"AdamW steps with updates that were made for SGD.*momentum=0"):
        train(SPEC, sgd, body, given=given)


def test_settings_that_change_before_the_step_are_named() -> None:
    def body(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.param_groups[0]["dampening"] = 0.1
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"SGD's settings now.* dampening.*the update that it steps with was made before"):
        train(SPEC, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9), body)


@both
def test_of_two_optimizers_the_one_that_steps_is_asked(optimizer_of: Any) -> None:
    """Alternating optimizers of one kind must not leave a momentum that acts twice."""

    def body(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
        other = made.setdefault(id(optimizer), optimizer_of(model.parameters()))
        acting = other if 4 <= step < 8 else optimizer
        plain(model, acting, step)
        assert not acting.state, "torch has no momentum beside the exchange's"

    made: dict[int, torch.optim.Optimizer] = {}
    train(SPEC, optimizer_of, body)


def test_freezing_after_attach_keeps_the_momentum() -> None:
    model = net()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw(model.parameters())
    handle = gradcomp.ddp.attach(wrapped, SPEC, optimizer=optimizer)
    model[0].weight.requires_grad_(False)
    plain(wrapped, optimizer, 0)
    assert handle.state_dict()["of_rank"]["0"]["layers"]["adam"]["second"] and not optimizer.state


def test_leaving_adam_in_mid_training_drops_directions() -> None:
    model = net()
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    optimizer = adamw(model.parameters())
    simulation = gradcomp.Simulation(
        "topk:ratio=0.1", shapes, 1, optimizer=optimizer, named_parameters=list(model.named_parameters())
    )
    for step in range(30):
        if step == 20:
            optimizer.param_groups[0]["amsgrad"] = True
        grads = {name: 1e-3 * torch.randn(shape) for name, shape in shapes.items()}
        with pytest.warns(UserWarning, match="AdamW's settings now") if step == 20 else contextlib.nullcontext():
            updates = simulation.step([grads])
        if step >= 20:
            assert all(update.abs().max() < 0.1 for update in updates.values()), "a direction came as a gradient"
        for name, parameter in model.named_parameters():
            parameter.grad = updates[name].clone()
        optimizer.step()


@pytest.mark.parametrize("known", [True, False])
def test_a_fused_optimizer_under_a_scaler(known: bool) -> None:
    def fused(kind: Any) -> tuple[Any, Any, DistributedDataParallel]:
        model = net()
        wrapped = DistributedDataParallel(model)
        optimizer = kind(model.parameters(), lr=0.01, fused=True, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        scaler = torch.amp.GradScaler("cpu")
        gradcomp.ddp.attach(wrapped, SPEC, optimizer=optimizer, scaler=scaler if known else None)
        return optimizer, scaler, wrapped

    optimizer, scaler, wrapped = fused(torch.optim.AdamW)
    scaler.scale(loss(wrapped, 0)).backward()
    with pytest.raises(RuntimeError, match="fused=False"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the unknown scaler
        scaler.step(optimizer)
    if known:
        optimizer, scaler, wrapped = fused(torch.optim.SGD)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.scale(loss(wrapped, 0)).backward()
            scaler.step(optimizer)
