"""Loops that users write, on one rank in the test's own process: with everything sent, the weights are torch's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import (
    BODIES,
    LEFT,
    SPEC,
    Body,
    Branching,
    Run,
    accumulate,
    adamw,
    clip_norm,
    freeze,
    keep,
    leave_out,
    plain,
    play,
    same,
    sgd,
    use_in_the_second_pass,
    use_now_and_then,
    without_gradients,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradcomp

pytestmark = pytest.mark.usefixtures("group_of_one")


def rmsprop(parameters: Any) -> Optimizer:
    return torch.optim.RMSprop(parameters, 0.01, momentum=0.9)


# SGD and RMSprop step by their momentum alone, so that the residual takes its place exactly. Adam corrects its first moment
# for the step, and keeps it here.
KINDS = [(sgd, SPEC), (sgd, LEFT), (rmsprop, SPEC), (adamw, LEFT)]
kinds = pytest.mark.parametrize("kind, spec", KINDS, ids=["sgd", "sgd's own momentum", "rmsprop", "adamw's own momentum"])


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Let every warning fail the test: none of these loops is odd."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@kinds
@pytest.mark.parametrize("body", BODIES)
def test_a_training_is_torchs_own(kind: Any, spec: str, body: Body) -> None:
    same(lambda spec: Run(kind, spec).on(body=body), spec)


@pytest.mark.parametrize("kind, spec", [(sgd, LEFT), (adamw, LEFT)])
def test_a_step_without_any_gradient_is_torchs_own(kind: Any, spec: str) -> None:
    """A momentum that the residual holds goes on, as if the gradients were zeros."""
    same(lambda spec: Run(kind, spec).on(body=without_gradients), spec)


@kinds
@pytest.mark.parametrize("body", [plain, leave_out, keep, play, accumulate, clip_norm])
def test_gradients_may_lie_in_ddps_buckets(kind: Any, spec: str, body: Body) -> None:
    same(lambda spec: Run(kind, spec, gradient_as_bucket_view=True).on(body=body), spec)


@pytest.mark.parametrize("kind", [sgd, adamw])
@pytest.mark.parametrize("body", [leave_out, play])
@pytest.mark.parametrize("spec", ["topk:ratio=0.2", "sdagc:lam=2,momentum=0", "orq:levels=5,feedback=true"])
def test_a_pass_that_no_step_follows_leaves_no_trace(kind: Any, spec: str, body: Body) -> None:
    """The weights and the residual are those of a training without it."""

    def without(run: Run, step: int) -> None:
        if body is play:
            accumulate(run, 2 * step)
        elif step % 3:
            plain(run, step)

    own, wanted = Run(kind, spec).on(range(9), body), Run(kind, spec).on(range(9), without)
    for run in (own, wanted):
        plain(run, 99)
    assert all(map(torch.equal, own.model.parameters(), wanted.model.parameters()))
    assert own.handle.stats()["steps"] == wanted.handle.stats()["steps"]
    assert all(torch.equal(one, wanted.residual()[name]) for name, one in own.residual().items())


@kinds
def test_a_clip_in_a_hook_of_the_optimizer_is_one_before_its_step(kind: Any, spec: str) -> None:
    """Also one that was registered before any step."""

    def training(spec: str | None) -> Run:
        run = Run(kind, spec)
        run.optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(run.model.parameters(), 0.1) and None)
        return run.on()

    same(training, spec)


@pytest.mark.parametrize("kind, spec", [(sgd, SPEC), (adamw, LEFT)])
def test_a_compiled_step_has_the_exchange_outside_its_graph(kind: Any, spec: str) -> None:
    """Without a word of the compiler's about gradcomp's code."""
    graphs: list[torch.fx.GraphModule] = []
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, on importing its compiler

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def training(spec: str | None) -> Run:
        run = Run(kind, spec)
        step: Any = torch.compile(run.optimizer.step, backend=note)

        def body(run: Run, at: int) -> None:
            run.optimizer.zero_grad()
            run.loss(at).backward()
            step()

        return run.on(range(4), body)

    same(training, spec)
    assert graphs


def scheduled(kind: Any, spec: str | None, *, momentum: bool) -> Run:
    run = Run(kind, spec)
    rate = run.optimizer.param_groups[0]["lr"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, rate, total_steps=12, cycle_momentum=momentum)

    def body(run: Run, step: int) -> None:
        plain(run, step)
        schedule.step()

    return run.on(body=body)


@pytest.mark.parametrize("kind, spec", [(sgd, LEFT), (adamw, LEFT)])
def test_schedules_of_rates_and_momentum_are_torchs_own(kind: Any, spec: str) -> None:
    same(lambda spec: scheduled(kind, spec, momentum=True), spec)


class RateInVelocity(torch.optim.SGD):
    """SGD whose velocity has each gradient with the rate of its own step, as a residual has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        m, rate = group["momentum"], group["lr"]
        for each in group["params"]:
            step = rate * (each.grad + group["weight_decay"] * each)
            velocity = self.state[each].setdefault("velocity", torch.zeros_like(each))
            velocity.mul_(m).add_(step)
            each.sub_(step + m * velocity)


def test_a_residual_has_each_gradient_with_the_rate_of_its_own_step() -> None:
    same(lambda spec: scheduled(sgd if spec else lambda p: RateInVelocity(p, 0.02, 0.9, 0, 0.05, True), spec, momentum=False))


# Loss scaling.


def scaled(kind: Any, spec: str | None, act: Callable[[Run, Any], None], passes: int = 1, **settings: Any) -> Run:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    run = Run(kind, spec, **settings)
    for step in range(12):
        run.optimizer.zero_grad()
        for part in range(passes):
            loss = run.loss(2 * step + part) * (float("inf") if step in (4, 9) else 1.0)
            scaler.scale(loss / passes).backward()
        act(run, scaler)
        scaler.step(run.optimizer)
        scaler.update()
    assert scaler.get_scale() == 1024.0  # it was doubled twice, and halved twice
    return run


def unscale_and_clip(run: Run, scaler: Any) -> None:
    scaler.unscale_(run.optimizer)
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)


@kinds
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("act", [lambda *_: None, unscale_and_clip], ids=["scaled", "clipped"])
def test_a_training_under_a_scaler_is_torchs_own(kind: Any, spec: str, act: Any, passes: int) -> None:
    same(lambda spec: scaled(kind, spec, act, passes), spec)


@pytest.mark.parametrize("told", [True, False])
def test_stats_have_the_norm_of_gradients_without_the_scale_of_a_scaler_that_is_given(told: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run = Run(sgd, "topk", scaler=scaler if told else None)
    scaler.scale(run.loss(0)).backward()
    norm = torch.cat([each.grad.flatten() for each in run.model.parameters()]).norm()
    assert run.handle.stats()["grad_norm"] == pytest.approx(float(norm) / (1024 if told else 1), rel=1e-5)


@pytest.mark.parametrize("kind, spec", [(torch.optim.AdamW, LEFT), (torch.optim.SGD, SPEC)])
def test_a_fused_optimizer_under_a_scaler_is_torchs_own(kind: Any, spec: str) -> None:
    """It unscales gradients and skips steps by itself."""
    same(lambda spec: scaled(lambda parameters: kind(parameters, lr=0.01, fused=True), spec, lambda *_: None), spec)


@kinds
@pytest.mark.parametrize("bad", [3, 7])
def test_a_guard_of_the_users_own_leaves_a_bad_step_out(kind: Any, spec: str, bad: int) -> None:
    def body(run: Run, step: int) -> None:
        run.optimizer.zero_grad()
        (run.loss(step) * (float("nan") if step == bad else 1.0)).backward()
        if all(bool(each.grad.isfinite().all()) for each in run.model.parameters()):  # type: ignore[union-attr]
            run.optimizer.step()

    same(lambda spec: Run(kind, spec).on(range(8), body), spec)


# Layers without a gradient.


@pytest.mark.parametrize("kind, spec", [(sgd, LEFT), (adamw, LEFT)])
@pytest.mark.parametrize("body", [freeze, use_now_and_then, use_in_the_second_pass])
def test_layers_may_be_frozen_and_unused(kind: Any, spec: str, body: Body) -> None:
    same(lambda spec: Run(kind, spec, Branching, find_unused_parameters=True).on(body=body), spec)


# States.


@kinds
def test_a_rollback_in_mid_step_is_torchs_own(kind: Any, spec: str) -> None:
    """The program goes back by two steps after a backward pass, and takes them again."""

    def training(spec: str | None) -> Run:
        run = Run(kind, spec).on(range(4))
        kept = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        ours = run.handle.state_dict() if spec else None
        run.on(range(4, 6))
        run.optimizer.zero_grad()
        run.loss(99).backward()
        run.model.load_state_dict(kept[0])
        run.optimizer.load_state_dict(kept[1])
        if spec:
            run.handle.load_state_dict(ours)
        return run.on(range(4, 12))

    same(training, spec)


@kinds
@pytest.mark.parametrize("steps", [0, 5])
def test_a_training_goes_back_to_a_state_of_torch_alone(kind: Any, spec: str, steps: int) -> None:
    """What the loaded moments have not delivered is delivered, also by an optimizer that has stepped before."""

    def training(spec: str | None) -> Run:
        first = Run(kind, None).on(range(4))
        run = Run(kind, spec).on(range(steps))
        run.model.load_state_dict(first.model.state_dict())
        run.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        return run.on(range(4, 12))

    same(training, spec)


def change_first(run: Run) -> None:
    run.handle.change(run.handle._session.spec)


def wrap_anew(run: Run) -> None:
    spec = run.handle._session.spec
    run.whole = run.handle = None
    run.whole = DistributedDataParallel(run.model)
    run.handle = gradcomp.ddp.attach(run.whole, spec)


def resume(run: Run) -> None:
    """Begin again with the state of this moment: the moments are in the optimizer's part of it."""
    state = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict(), run.handle.state_dict()))
    run.on(range(3))
    run.model.load_state_dict(state[0])
    run.optimizer.load_state_dict(state[1])
    run.handle.load_state_dict(state[2])


def nothing(run: Run) -> None:
    pass


@kinds
@pytest.mark.parametrize("before", [nothing, change_first, wrap_anew])
@pytest.mark.parametrize("after", [nothing, change_first, wrap_anew, resume])
def test_moments_of_torch_alone_wait_for_the_next_step(kind: Any, spec: str, before: Any, after: Any) -> None:
    """Where a program changes the spec, wraps the model anew or resumes around the load, they are delivered, once."""

    def training(spec: str | None) -> Run:
        first = Run(kind, None).on(range(4))
        run = Run(kind, spec).on(range(3))
        if spec:
            before(run)
        run.model.load_state_dict(first.model.state_dict())
        run.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        if spec:
            after(run)
        return run.on(range(4, 12))

    same(training, spec)


@kinds
@pytest.mark.parametrize("changes", [False, True])
def test_a_state_for_torchs_checkpoint_has_all_that_a_new_optimizer_looks_for(kind: Any, spec: str, changes: bool) -> None:
    """Gradients are there, so that torch makes no state before it saves, and the momentum was hidden."""
    ours, theirs = (Run(kind, each).on(range(3)) for each in (spec, None))
    if changes:
        change_first(ours)
    own, wanted = (get_optimizer_state_dict(each.model, each.optimizer)["state"] for each in (ours, theirs))
    assert {name: each.keys() for name, each in own.items()} == {name: each.keys() for name, each in wanted.items()}


@kinds
def test_a_training_resumes_with_new_objects(kind: Any, spec: str) -> None:
    def training(spec: str | None) -> Run:
        first, run = Run(kind, spec).on(range(20)), Run(kind, spec)
        run.model.load_state_dict(first.model.state_dict())
        run.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        if spec:
            run.handle.load_state_dict(first.handle.state_dict())
        return run.on(range(20, 25))

    same(training, spec)
