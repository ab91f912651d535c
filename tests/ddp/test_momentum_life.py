"""momentum=auto between exchanges: steps without one, resumed trainings, rollbacks, and updates that are never applied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from one_rank import SPEC, Body, adamw, loss, net, plain, sgd, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.native import kernels

pytestmark = pytest.mark.usefixtures("group_of_one")
both = pytest.mark.parametrize("optimizer_of", [sgd, adamw])


def without_exchange(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss(model if step < 3 else model.module, step).backward()
    optimizer.step()


def in_no_sync(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    if step < 3:
        loss(model, step).backward()
    else:
        with model.no_sync():
            loss(model, step).backward()
    optimizer.step()


def twice(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    plain(model, optimizer, step)
    optimizer.step()


@both
@pytest.mark.parametrize("body", [without_exchange, in_no_sync, twice])
def test_a_step_without_an_exchange_is_refused(optimizer_of: Any, body: Body) -> None:
    """Adam did nothing, and SGD lost its momentum and weight decay."""
    with pytest.raises(RuntimeError, match=r"steps without an exchange.*no_sync\(\).*SPEC,momentum=0"):
        train(SPEC, optimizer_of, body)


@both
def test_a_step_of_zeros_without_an_exchange_leaves_the_training_alone(optimizer_of: Any) -> None:
    """hvd.broadcast_optimizer_state() makes one. Neither the momentum nor the weight decay acts in it."""

    def body(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
        plain(model, optimizer, step)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    ours, theirs = train(SPEC, optimizer_of, body)[0], train(None, optimizer_of, plain)[0]
    for own, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


def resumed(optimizer_of: Any, given: bool, spec: str | None = SPEC) -> nn.Module:
    """Train 20 steps, and go on with new objects for 5."""
    model, optimizer, handle = train(spec, optimizer_of, plain, steps=20)
    weights = copy.deepcopy(model.state_dict())
    states = copy.deepcopy(optimizer.state_dict()), None if handle is None else handle.state_dict()
    model = net()
    model.load_state_dict(weights)
    optimizer = optimizer_of(model.parameters())
    wrapped = DistributedDataParallel(model)
    if spec is not None:
        handle = gradcomp.ddp.attach(wrapped, spec, optimizer=optimizer if given else None)
        handle.load_state_dict(states[1])
    optimizer.load_state_dict(states[0])
    for step in range(20, 25):
        plain(wrapped, optimizer, step)
    return model


@both
def test_a_resumed_training_needs_its_optimizer(optimizer_of: Any) -> None:
    """Unknown in the first step, the optimizer would begin anew: what was loaded would be dropped without a word."""
    ours, theirs = resumed(optimizer_of, True), resumed(optimizer_of, True, None)
    for own, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"the loaded state holds .* pass optimizer="):
        resumed(optimizer_of, False)


@both
def test_a_change_of_a_resumed_training_needs_its_optimizer(optimizer_of: Any) -> None:
    model, _, handle = train(SPEC, optimizer_of, plain, steps=3)
    state = handle.state_dict()
    handle = gradcomp.ddp.attach(DistributedDataParallel(model), SPEC)
    handle.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"the loaded state holds .* pass optimizer="):
        handle.change(f"{SPEC},momentum=0")


def test_a_state_without_moments_needs_no_optimizer() -> None:
    def bare(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.05)

    ours, theirs = resumed(bare, False), resumed(bare, False, None)
    for own, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


def rolls_back(by: str) -> Body:
    """Go back by two steps in the middle of a step, and do them again."""
    kept: dict[str, Any] = {}

    def body(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
        session = None if (handle := model.__dict__.get("handle")) is None else handle._session
        if step == 4:
            kept["weights"], kept["optimizer"] = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
            if session is not None:
                kept["ours"] = session.state_dict() if by == "load_state_dict" else session.snapshot()
        if step == 6:
            optimizer.zero_grad()
            loss(model, 99).backward()  # and an error of the user's own before step()
            model.module.load_state_dict(kept["weights"])
            optimizer.load_state_dict(kept["optimizer"])
            if session is not None:
                (session.load_state_dict if by == "load_state_dict" else session.restore)(kept["ours"])
            for again in (4, 5):
                plain(model, optimizer, again)
        plain(model, optimizer, step)

    return body


@both
@pytest.mark.parametrize("by", ["load_state_dict", "snapshot and restore"])
def test_a_rollback_in_mid_step_is_torchs_own(optimizer_of: Any, by: str) -> None:
    ends = []
    for spec in (SPEC, None):
        model = net()
        wrapped = DistributedDataParallel(model)
        optimizer, body = optimizer_of(model.parameters()), rolls_back(by)
        if spec is not None:
            wrapped.__dict__["handle"] = gradcomp.ddp.attach(wrapped, spec, optimizer=optimizer)
        for step in range(12):
            body(wrapped, optimizer, step)
        ends.append(model)
    for own, wanted in zip(*(end.parameters() for end in ends), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


def test_moments_that_are_loaded_again_have_their_own_step_count() -> None:
    """Torch's state of step 5, loaded into a training at step 60, goes on with the corrections of step 6."""
    ends = []
    for spec in (SPEC, None):
        torch_only, fresh, _ = train(None, adamw, plain, steps=5)
        state = copy.deepcopy(fresh.state_dict())
        model = net()
        wrapped, optimizer = DistributedDataParallel(model), adamw(model.parameters())
        if spec is not None:
            gradcomp.ddp.attach(wrapped, spec, optimizer=optimizer)
        for first, last in ((5, 60), (60, 62)):
            model.load_state_dict(torch_only.state_dict())
            optimizer.load_state_dict(copy.deepcopy(state))
            for step in range(first, last):
                plain(wrapped, optimizer, step)
        ends.append(model)
    for own, wanted in zip(*(end.parameters() for end in ends), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


def accumulate(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    for part in range(2):
        (loss(model, 2 * step + part) / 2).backward()
    optimizer.step()


@both
def test_an_update_that_is_not_applied_is_refused_on_a_gpu(optimizer_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a step's failure is unknown until somebody waits for the device."""
    monkeypatch.setattr(kernels, "may_have_failed", lambda verdicts, step: True)
    with pytest.raises(RuntimeError, match=r"has not applied the last one's update"):
        train(SPEC, optimizer_of, accumulate)


@both
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_failed_need_not_be_applied(
    optimizer_of: Any, scaled: bool, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GradScaler skips it, or the user's own check of the gradients does. Then change() may come, too."""
    if on_gpu:
        monkeypatch.setattr(kernels, "may_have_failed", lambda verdicts, step: True)
    model = net()
    wrapped, optimizer = DistributedDataParallel(model), optimizer_of(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    handle = gradcomp.ddp.attach(wrapped, SPEC, optimizer=optimizer, scaler=scaler)
    for step in range(8):
        optimizer.zero_grad()
        factor = float("inf") if step in (3, 7) else 1.0
        error = factor * loss(wrapped, step)
        (error if scaler is None else scaler.scale(error)).backward()
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif all(bool(each.grad.isfinite().all()) for each in model.parameters()):
            optimizer.step()
    handle.change(f"{SPEC},momentum=0")
    assert all(bool(each.isfinite().all()) for each in model.parameters())


@both
@pytest.mark.parametrize("reason", ["unknown", "other settings"])
def test_moments_that_the_optimizer_made_itself_stay(optimizer_of: Any, reason: str) -> None:
    """An unknown optimizer, or one with settings that are left to it, has moments of its own when the spec changes."""
    key, (odd, usual) = ("dampening", (0.3, 0)) if optimizer_of is sgd else ("amsgrad", (True, False))

    def prepared(parameters: Any) -> torch.optim.Optimizer:
        optimizer = optimizer_of(parameters)
        optimizer.param_groups[0]["nesterov"] = False
        if reason == "other settings":
            optimizer.param_groups[0][key] = odd
        return optimizer

    ends = []
    for spec in (SPEC, None):
        model = net()
        wrapped, optimizer = DistributedDataParallel(model), prepared(model.parameters())
        given = optimizer if reason == "other settings" else None
        handle = None if spec is None else gradcomp.ddp.attach(wrapped, spec, optimizer=given)
        steps = 1 if reason == "unknown" else 4
        for step in range(steps):
            plain(wrapped, optimizer, step)
        optimizer.param_groups[0][key] = usual
        if handle is not None:
            handle.change(f"{SPEC},momentum=0")
        for step in range(steps, 10):
            plain(wrapped, optimizer, step)
        ends.append(model)
    for own, wanted in zip(*(end.parameters() for end in ends), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)
