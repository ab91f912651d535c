"""Exchanges that no step of an optimizer applies, and steps that call a closure: trainings are those of torch alone."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_rank import LEFT, SPEC, Body, Run, accumulate, accumulate_alone, adamw, both, plain, same, sgd
from torch import Tensor, nn
from torch.optim import Optimizer

pytestmark = [
    pytest.mark.usefixtures("group_of_one"),
    pytest.mark.filterwarnings("ignore:no optimizer.step.. applied .* In a GAN"),
]


def close(run: Run, step: int) -> None:
    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward()
        return loss

    assert run.optimizer.step(closure) > 0


def drop(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    run.loss(step).backward()
    if step % 3:
        run.optimizer.step()


def drop_late(run: Run, step: int) -> None:
    """Drop updates by gradients of zeros, and once by None."""
    run.optimizer.zero_grad(set_to_none=step == 10)
    run.loss(step).backward()
    if step not in (9, 10):
        run.optimizer.step()


def play(run: Run, step: int) -> None:
    """Train a discriminator: two losses in two passes, a step, and a pass of the generator's loss, which is dropped."""
    accumulate(run, 2 * step)
    run.loss(2 * step + 1).backward()


def regularise(run: Run, step: int) -> None:
    """Add the gradient of a loss that goes round the model, and is the same on all ranks."""
    run.optimizer.zero_grad()
    run.loss(step).backward()
    (0.1 * sum(each.square().sum() for each in run.model.parameters())).backward()
    torch.autograd.grad(run.loss(step), [*run.model.parameters()])
    run.optimizer.step()


@both
@pytest.mark.parametrize("spec", [SPEC, LEFT])
@pytest.mark.parametrize("body", [plain, accumulate_alone, accumulate, drop, play, close])
def test_a_training_alone_is_torchs_own(optimizer_of: Any, spec: str, body: Body) -> None:
    same(lambda spec: Run(optimizer_of, spec).on(body=body), spec)
    if body is play:
        same(lambda spec: Run(optimizer_of, spec, gradient_as_bucket_view=True).on(body=body), spec)


@both
def test_a_loss_round_the_model_keeps_the_update(optimizer_of: Any) -> None:
    same(lambda spec: Run(optimizer_of, spec).on(body=regularise), LEFT)


@both
@pytest.mark.parametrize("body", [drop, play])
@pytest.mark.parametrize("spec", ["topk:ratio=0.2", "sdagc:lam=2,momentum=0", "orq:levels=5,feedback=true"])
def test_an_exchange_that_no_step_applies_leaves_no_trace(optimizer_of: Any, spec: str, body: Body) -> None:
    """The weights and the state are those of a training without it."""

    def without(run: Run, step: int) -> None:
        if body is play:
            accumulate(run, 2 * step)
        elif step % 3:
            plain(run, step)

    own, wanted = Run(optimizer_of, spec), Run(optimizer_of, spec)
    own.on(range(9), body)
    wanted.on(range(9), without)
    plain(own, 99)
    plain(wanted, 99)
    for one, other in zip(own.model.parameters(), wanted.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert own.handle.stats()["steps"] == wanted.handle.stats()["steps"]
    assert all(torch.equal(one, wanted.residual()[name]) for name, one in own.residual().items())


@both
@pytest.mark.parametrize("kept", [False, True])
def test_the_first_late_exchange_without_a_step_warns(optimizer_of: Any, kept: bool) -> None:
    """Its state was not copied. Later ones are undone."""

    def body(run: Run, step: int) -> None:
        (accumulate if step > 9 else plain)(run, step) if kept else drop_late(run, step)

    with pytest.warns(UserWarning, match=r"no optimizer.step\(\) applied the update of exchange 1\d.*This once") as seen:
        Run(optimizer_of, "topk:ratio=0.2").on(range(14), body)
    assert len(seen) == 1 and seen[0].filename.endswith(("one_rank.py", "test_unapplied.py"))


@both
def test_a_loop_over_the_parameters_is_no_dropped_update(optimizer_of: Any) -> None:
    """No optimizer steps, so that a residual would never last."""

    def body(run: Run, step: int) -> None:
        run.optimizer.zero_grad()
        run.loss(step).backward()
        with torch.no_grad():
            for each in run.model.parameters():
                each.data -= 0.1 * each.grad  # type: ignore[operator]

    left = Run(optimizer_of, "topk:ratio=0.2", given=False).on(body=body).residual()
    assert sum(float(each.abs().sum()) for each in left.values()) > 0
    refused = pytest.raises(RuntimeError, match=r"has not applied the last one's update.* If a guard leaves out all steps")
    with refused, pytest.warns(UserWarning, match=r"no optimizer.step\(\) applied the last 4 updates"):
        Run(optimizer_of, "topk:ratio=0.2").on(range(20), body)


@pytest.mark.parametrize("spec", ["topk", "auto", "topk:momentum=0.9,feedback=false", "orq:momentum=0", "sign:feedback=false"])
def test_a_closure_that_is_called_several_times_is_refused_where_exchanges_differ(spec: str) -> None:
    def lbfgs(parameters: Any) -> Optimizer:
        return torch.optim.LBFGS(parameters, max_iter=4)

    for given in (False, True):
        with pytest.raises(RuntimeError, match=r"LBFGS calls its closure several times.*blocks, half or dense, or"):
            Run(lbfgs, spec, given=given).on(body=close)
    same(lambda spec: Run(lbfgs, spec).on(range(3), close), "dense")
    for exact in ("half", "blocks"):
        Run(lbfgs, exact).on(range(3), close)


@pytest.mark.parametrize("spec", ["topk:ratio=0.2", "topk:ratio=0.2,momentum=0"])
def test_a_step_that_raises_an_error_is_no_closure(spec: str) -> None:
    """torch calls no hook after it. The exchanges of the passes that follow are not within it."""
    run = Run(adamw, spec).on(range(2))

    def fail(*_: Any) -> None:
        raise MemoryError

    hook = run.optimizer.register_step_pre_hook(fail)
    with pytest.raises(MemoryError):
        plain(run, 2)
    hook.remove()
    run.on(range(3, 6), accumulate)


def cancel(run: Run, step: int) -> None:
    """Remove the last layer's gradient, as DINO does in its first epoch."""
    run.optimizer.zero_grad()
    run.loss(step).backward()
    for each in run.model[2].parameters():
        each.grad = None
    run.optimizer.step()


def warned(training: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        training()
    return [each for each in seen if "was set to None between its exchange and step()" in str(each.message)]


@both
@pytest.mark.parametrize("spec", ["topk:ratio=0.2", "topk:ratio=0.2,momentum=0", SPEC])
@pytest.mark.parametrize("begins", [0, 2, 20])
def test_a_gradient_that_is_removed_before_the_step_is_warned_of_once(optimizer_of: Any, spec: str, begins: int) -> None:
    (seen,) = warned(lambda: Run(optimizer_of, spec).on(range(begins)).on(range(begins, begins + 17), cancel))
    assert str(seen.message).startswith("the gradient of '2.") and seen.filename == __file__


def freeze(run: Run, step: int) -> None:
    """Do what the warning says."""
    run.model[2].requires_grad_(step > 5)
    plain(run, step)


def part(run: Run, step: int) -> None:
    """Leave the last layer out of some passes."""
    run.optimizer.zero_grad()
    run.loss(step).backward() if step % 3 else run.whole(torch.ones(6, 7), part=True).sum().backward()
    run.optimizer.step()


def drop_all(run: Run, step: int) -> None:
    """Step with no gradient at all, as a loop does that clears the gradients of a bad batch."""
    run.optimizer.zero_grad()
    run.loss(step).backward()
    if step % 3 == 0:
        run.optimizer.zero_grad()
    run.optimizer.step()


class Parts(nn.Sequential):
    def forward(self, x: Tensor, part: bool = False) -> Tensor:
        hidden = self[1](self[0](x))
        return hidden if part else self[2](hidden)


@both
@pytest.mark.parametrize("body", [freeze, part, drop_all, drop, play, close])
@pytest.mark.parametrize("spec", ["topk:ratio=0.2", "topk:ratio=0.2,momentum=0"])
def test_no_other_loop_is_warned_of(optimizer_of: Any, spec: str, body: Body) -> None:
    def training() -> None:
        Run(optimizer_of, spec, layers=Parts, find_unused_parameters=True).on(body=body)

    assert not warned(training)
    assert not warned(lambda: Run(optimizer_of, "half").on(body=cancel))


@both
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("body", [accumulate, drop])
def test_an_update_that_is_not_applied_is_undone_on_a_gpu(optimizer_of: Any, body: Body) -> None:
    same(lambda spec: Run(optimizer_of, spec).on(body=body))


def test_a_layer_that_is_frozen_in_mid_training_is_named() -> None:
    """DDP waits for its gradient, and exchanges nothing."""
    run = Run(sgd).on(range(3))
    run.model[0].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'0\.bias' has no gradient: if it is frozen.*find_unused_parameters=True"):
        plain(run, 3)


@both
@pytest.mark.parametrize("spec, warns", [("topk:ratio=0.2", True), ("orq", False)])
def test_a_residual_is_warned_of_where_many_updates_are_dropped(optimizer_of: Any, spec: str, warns: bool) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Run(optimizer_of, spec).on(range(14), drop)
    assert sum("In a GAN" in str(each.message) for each in seen) == warns


def leave_out(run: Run, step: int, begins: int = 2) -> None:
    """Leave out every step, as a guard does that takes the norm of an update for a gradient's."""
    run.optimizer.zero_grad()
    run.loss(step).backward()
    if step < begins:
        run.optimizer.step()


def leave_out_late(run: Run, step: int) -> None:
    leave_out(run, step, begins=10)


def leave_out_nan(run: Run, step: int) -> None:
    """Leave out a finite one, and then the steps of gradients that are not finite, as a GradScaler does."""
    run.optimizer.zero_grad()
    (run.loss(step) * (float("nan") if step > 2 else 1.0)).backward()
    if step in (0, 2):
        run.optimizer.step()


def leave_out_three(run: Run, step: int) -> None:
    leave_out(run, step % 4, begins=1)


def rival(run: Run, step: int) -> None:
    """Drop five updates for each step, while another model trains."""
    leave_out(run, step % 6, begins=1)
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), 0.1).step()


@both
@pytest.mark.parametrize("spec", ["topk:ratio=0.2", "orq", SPEC])
def test_steps_that_are_all_left_out_are_warned_of_once(optimizer_of: Any, spec: str) -> None:
    """The warning comes as the fourth one is noticed, at a user's line, since no step may follow."""

    def texts(body: Body, steps: int) -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            Run(optimizer_of, spec).on(range(steps), body)
        assert all(each.filename.endswith(("one_rank.py", "test_unapplied.py")) for each in seen)
        return [str(each.message) for each in seen if "This once" not in str(each.message)]

    assert texts(leave_out, 6) == []
    (text,) = texts(leave_out, 40)
    assert "applied the last 4 updates" in text and "mean over the ranks of stats()['grad_norm']" in text
    assert texts(leave_out_late, 30) == [text]
    assert texts(leave_out_nan, 20) == [] and not any("applied the last" in each for each in texts(leave_out_three, 20))
    assert ["In a GAN" in each for each in texts(rival, 20)] == ([] if spec == "orq" else [True])


def climb(run: Run, step: int, by: Callable[[], Any]) -> None:
    """Take a step of SAM: climb by gradients, and step from the first place by those from up there. by: of the first pass."""
    parameters = [*run.model.parameters()]
    run.optimizer.zero_grad()
    with by():
        run.loss(step).backward()
    with torch.no_grad():
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        climbs = [0.05 * each.grad / norm for each in parameters]
        torch._foreach_add_(parameters, climbs)
        run.optimizer.zero_grad()
    run.loss(step).backward()
    with torch.no_grad():
        torch._foreach_sub_(parameters, climbs)
    run.optimizer.step()


@both
def test_the_first_pass_of_sam_exchanges_nothing_in_no_sync(optimizer_of: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(lambda spec: Run(optimizer_of, spec).on(body=lambda run, step: climb(run, step, run.whole.no_sync)), LEFT)
    with pytest.warns(UserWarning, match=r"as SAM's does, run it in DistributedDataParallel\.no_sync\(\)"):
        Run(optimizer_of, "topk:ratio=0.2").on(body=lambda run, step: climb(run, step, contextlib.nullcontext))


class Branching(nn.Sequential):
    """Layers, and one more that only some passes use."""

    uses = True

    def __init__(self, *layers: nn.Module):
        super().__init__(*layers)
        self.branch = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[1](self[0](x))
        y = self[2](y)
        return y + self.branch(y) if self.uses else y


def use_in_the_second_pass(run: Run, step: int) -> None:
    """Accumulate over two exchanges, of which the first does not use a layer."""
    run.optimizer.zero_grad()
    for part in range(2):
        run.model.uses = part == 1
        (run.loss(2 * step + part) / 2).backward()
    run.optimizer.step()


@both
@pytest.mark.parametrize("spec", [SPEC, LEFT])
def test_a_layer_that_the_first_of_two_passes_does_not_use_has_no_gradient_of_it(optimizer_of: Any, spec: str) -> None:
    same(lambda spec: Run(optimizer_of, spec, Branching, find_unused_parameters=True).on(body=use_in_the_second_pass), spec)


@both
def test_two_passes_under_a_scaler_are_no_change_of_gradients(optimizer_of: Any) -> None:
    """The update of the first pass has the loss scale when the second one begins."""

    def training(spec: str | None) -> Run:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        run = Run(optimizer_of, spec, scaler=scaler)
        for step in range(12):
            run.optimizer.zero_grad()
            for part in range(2):
                scaler.scale(run.loss(2 * step + part) / 2).backward()
            scaler.step(run.optimizer)
            scaler.update()
        return run

    same(training)
