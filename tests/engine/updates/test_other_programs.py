"""Programs that others write: what an exchange of updates makes of optimizers that share layers, models, or a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replicas import Replica, Replicas
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from training import SHAPES, draw

import gradcomp

pytestmark = pytest.mark.usefixtures("group_of_one")

ALL = "topk:ratio=1,wire=exact"
SPEC = "topk:ratio=0.3"
ZEROS = [{name: torch.zeros(shape) for name, shape in SHAPES.items()}]
KINDS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda weights: optim.SGD(weights, 0.05, momentum=0.9),
    "adamw": lambda weights: optim.AdamW(weights, 0.01),
}


def attached(spec: str | None = ALL) -> tuple[nn.Linear, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    whole = DistributedDataParallel(model)
    return model, whole, None if spec is None else gradcomp.ddp.attach(whole, spec)


def backward(whole: Any, *others: Tensor) -> None:
    (whole(torch.ones(5, 4)).square().mean() + sum(each.sum() for each in others)).backward()


def check_ends_as_alone(make: Callable[[Any], optim.Optimizer]) -> None:
    """Hold that a training with everything sent ends with the weights of one without gradcomp."""
    ends = []
    for spec in (None, ALL):
        model, whole, _ = attached(spec)
        optimizer = make(model.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            backward(whole)
            optimizer.step()
        ends.append(model.weight.detach().clone())
    torch.testing.assert_close(*ends)


def settings(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


# Layers.


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("order", [("head b", "shared", "head a"), ("shared", "head a", "head b")])
def test_a_layer_of_two_optimizers_stays_equal_on_all_ranks(kind: Any, order: tuple[str, ...]) -> None:
    shapes = dict.fromkeys(order, (6, 4))

    def optimizers(weights: Any) -> list[optim.Optimizer]:
        named = dict(zip(order, weights, strict=True))
        return [kind([named["shared"], named[head]]) for head in ("head a", "head b")]

    ours = Replicas(SPEC, optimizers, shapes, ranks=2)
    for step in range(16):
        ours.exchange(draw(step, shapes, 2))
        ours.each(lambda rank, step=step: rank.step(rank.optimizers[step % 2]))  # type: ignore[misc]
        ours.check_equal()


class Hybrid(optim.Optimizer):
    """Steps matrices itself, and leaves each other layer to an inner optimizer."""

    def __init__(self, weights: Any):
        weights = [*weights]
        super().__init__(weights, {"lr": 0.05})
        self.inner = [optim.AdamW([each], lr=0.01) for each in weights if each.dim() == 1]

    @torch.no_grad()
    def move(self) -> None:
        for each in self.param_groups[0]["params"]:
            if each.dim() == 2:
                each -= 0.05 * each.grad


@pytest.mark.parametrize("first", [True, False])
def test_an_optimizer_with_inner_ones_for_some_layers_exchanges_the_others(first: bool) -> None:
    """Ranks that compare their weights while its own layers have moved, and have not travelled yet, warn of nothing."""
    ours = Replicas(SPEC, Hybrid, ranks=2)

    def step(rank: Replica) -> None:
        hybrid: Any = rank.optimizer
        rank.begin(hybrid)
        if first:
            hybrid.move()
        for inner in hybrid.inner:
            rank.step(inner)
        if not first:
            hybrid.move()
        rank.session.updates.after(hybrid)

    for number in range(10):  # the tenth exchange is an inner one's, or the outer one's
        ours.exchange(draw(number, ranks=2))
        ours.each(step)
        ours.check_equal()


class Several(optim.Optimizer):
    """Steps nothing itself: each half of the layers has an inner optimizer."""

    def __init__(self, weights: Any):
        weights = [*weights]
        super().__init__(weights, {})
        self.inner = [KINDS["sgd"](half) for half in (weights[:2], weights[2:])]


def test_an_optimizer_of_several_inner_ones_exchanges_each_layer_once() -> None:
    """Also in the first step, where the second one is found after the first one's exchange."""
    ours, theirs = Replicas(ALL, Several, ranks=2), Replicas(None, KINDS["sgd"], ranks=2)

    def step(rank: Replica) -> None:
        several: Any = rank.optimizer
        rank.begin(several)
        for inner in several.inner:
            rank.step(inner)
        rank.session.updates.after(several)

    for number in range(4):
        grads = draw(number, ranks=2)
        ours.exchange(grads)
        ours.each(step)
        ours.check_equal()
        theirs.step(grads)
    ours.ends_as(theirs)


class Around(optim.SGD):
    """Moves the weights before and after its parent's step, by its own gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        for each in params:
            each -= 0.01 * each.grad
        found = super().step(closure)
        for each in params:
            each -= 0.02 * each.grad
        return found


def test_a_step_that_calls_its_parents_is_one_step() -> None:
    optim.SGD([nn.Parameter(torch.zeros(1))])  # torch then patches the parent's step, too
    check_ends_as_alone(lambda weights: Around(weights, lr=0.1, momentum=0.9))


# Optimizers of more than one model.


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam])
def test_an_optimizer_of_two_models_keeps_its_settings_and_steps_as_alone(kind: Any) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if kind is optim.SGD else {"betas": (0.0, 0.999)}
    ends = []
    for spec in (None, ALL):
        models = [attached(spec) for _ in range(2)]
        optimizer = kind([each for model, _, _ in models for each in model.parameters()], lr=0.01, **options)
        before = settings(optimizer)
        for _ in range(5):
            optimizer.zero_grad()
            for _, whole, _ in models:
                backward(whole)
            optimizer.step()
            assert settings(optimizer) == before
        ends.append([model.weight.detach().clone() for model, _, _ in models])
    for alone, ours in zip(*ends, strict=True):
        torch.testing.assert_close(ours, alone)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_parameters_outside_of_the_exchange_keep_their_momentum(kind: Any) -> None:
    paths = []
    for spec in (None, SPEC):
        model, whole, _ = attached(spec)
        outside, path = nn.Parameter(torch.zeros(2)), []
        optimizer = kind([*model.parameters(), outside])
        for step in range(6):
            optimizer.zero_grad()
            backward(whole, outside * (step == 0))
            optimizer.step()
            path.append(outside.detach().clone())
        paths.append(torch.stack(path))
    assert torch.equal(*paths)


def test_each_step_goes_into_the_residual_by_its_own_optimizers_rule() -> None:
    ours = Replicas(ALL, lambda weights: optim.Adam(weights, lr=0.0), ranks=1).train(3)

    class Signs(optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for each in self.param_groups[0]["params"]:
                each -= 0.01 * each.grad.sign()

    ours.ranks[0].optimizers = [Signs(ours.weights.values(), {})]
    before = ours.copied()
    ours.train(1, first=3)
    for name, each in ours.copied().items():
        torch.testing.assert_close((before[name] - each).abs(), torch.full_like(each, 0.01), rtol=1e-4, atol=1e-6)


# Steps that fail, and closures.


def failing(optimizer: optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step move a part of the weights, and raise an error."""

    def move(*args: Any, **options: Any) -> None:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].add_(1.0)
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(sys.modules[optim.SGD.__module__], "sgd", move)
        optimizer.step()


def test_an_interrupt_before_the_exchange_fails_the_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later steps are no part of it, and exchange."""
    model, whole, handle = attached()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = model.weight.detach().clone()
    backward(whole)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(handle._session.updates.optimizers, "known", raising(KeyboardInterrupt()))
        optimizer.step()
    backward(whole)
    assert torch.equal(model.weight, before)
    for _ in range(2):
        optimizer.step()
        backward(whole)
    assert handle.stats()["steps"] == 2


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*arguments: Any) -> None:
        raise error

    return call


@pytest.mark.parametrize("then", ["state_dict", "forward"])
def test_a_step_that_fails_is_undone_and_a_schedule_goes_on(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, whole, _ = attached()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    backward(whole)
    optimizer.step()
    before, wanted = model.weight.detach().clone(), settings(optimizer)
    failing(optimizer, monkeypatch)
    if then == "state_dict":
        optimizer.state_dict()
    else:
        whole(torch.ones(5, 4))
    assert torch.equal(model.weight, before) and settings(optimizer) == wanted
    failing(optimizer, monkeypatch)
    schedule.step()  # before anybody has seen that the step failed
    backward(whole)
    assert torch.equal(model.weight, before) and optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    failing(optimizer, monkeypatch)
    optimizer.param_groups[0]["lr"] = 0.005
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.005 and optimizer.param_groups[0]["momentum"] == 0.9


def test_a_closure_reads_and_sets_the_users_settings() -> None:
    model, whole, handle = attached()
    optimizer, seen = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True), []

    def closure(rate: float) -> None:
        optimizer.zero_grad()
        backward(whole)
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.param_groups[0]["lr"] = rate
        with pytest.raises(RuntimeError, match=r"change\(\) came in the middle of a step"):
            handle.change("blocks")

    for rate in (0.2, 0.3):
        optimizer.step(lambda rate=rate: closure(rate))  # type: ignore[misc]
    assert seen == [(0.1, 0.9), (0.2, 0.9)] and optimizer.param_groups[0]["lr"] == 0.3


def test_a_momentum_of_one_stays_the_optimizers() -> None:
    check_ends_as_alone(lambda weights: optim.SGD(weights, lr=0.01, momentum=1.0))


def test_a_step_that_only_makes_a_state_to_save_exchanges_nothing() -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, whole, handle = attached(SPEC)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(whole)
    optimizer.step()
    optimizer.zero_grad()
    before = model.weight.detach().clone()
    get_state_dict(whole, optimizer)
    assert torch.equal(model.weight, before) and handle.stats()["steps"] == 1


# Clips, and changes of the spec.


def test_a_clip_of_the_spec_sees_gradients_without_a_loss_scale() -> None:
    ends = []
    for fused in (False, True):
        ours = Replicas(f"{ALL},clip=0.5", lambda weights, fused=fused: optim.SGD(weights, 0.05, fused=fused), ranks=1)  # type: ignore[misc]
        ours.exchange(draw(0))
        if fused:
            for each in ours.weights.values():
                assert each.grad is not None
                each.grad.mul_(1024)
            ours.optimizer.grad_scale, ours.optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)  # type: ignore[attr-defined]
        ours.step()
        ends.append(ours)
    ends[1].ends_as(ends[0], 1e-5, 1e-7)


@pytest.mark.parametrize("to", ["dense", "blocks"])
def test_a_change_between_backward_and_step_averages_the_gradients(to: str) -> None:
    """Also between the steps of two optimizers, where auto may change."""

    def two(weights: Any) -> list[optim.Optimizer]:
        first, *others = weights
        return [KINDS["sgd"]([first]), KINDS["adamw"](others)]

    ours = Replicas(SPEC, two, ranks=2).train(3)
    ours.exchange(draw(3, ranks=2))
    ours.each(lambda rank: rank.step(rank.optimizers[0]))
    ours.change(to)
    ours.each(lambda rank: rank.step(rank.optimizers[1]))
    ours.check_equal()
    ours.train(3, first=4)


@pytest.mark.parametrize(
    "sequence",
    [
        ("dense", ALL),
        (ALL, "dense", ALL),
        (ALL, "half", ALL, "dense", ALL),
        (f"{ALL},momentum=0", ALL),
        (ALL, f"{ALL},momentum=0", ALL),
    ],
    ids=" to ".join,
)
def test_a_gradients_whole_effect_arrives_through_all_changes(sequence: tuple[str, ...]) -> None:
    grads = draw(0)
    ours = Replicas(sequence[0], lambda weights: optim.SGD(weights, 0.01, momentum=0.9), ranks=1, size=0.0)
    for i, spec in enumerate(sequence):
        if i:
            ours.change(spec)
        for _ in range(5):
            ours.step(grads)
    for _ in range(200):
        ours.step(ZEROS)
    for name, each in ours.copied().items():
        torch.testing.assert_close(-each, grads[0][name].double() * 0.1 * 5 * len(sequence), rtol=0.02, atol=1e-3)


def test_an_algorithms_own_momentum_takes_the_place_of_the_optimizers() -> None:
    shapes, ends = {"w": (400,)}, []
    grads = [{"w": 0.5 + torch.rand(400, generator=torch.Generator().manual_seed(1))}]
    for momentum in (0.0, 0.9):
        ours = Replicas(
            "sdagc:density=0.3,sam=0.9",
            lambda weights, m=momentum: optim.SGD(weights, 0.001, momentum=m),
            shapes,
            size=0.0,  # type: ignore[misc]
        )
        for _ in range(50):
            ours.step(grads)
        ends.append(ours.copied()["w"])
    torch.testing.assert_close(*ends)


def test_an_infinite_gradient_is_clipped_as_alone() -> None:
    """With a clip by value, one entry of a gradient on one rank spoils no layer."""
    ours = Replicas(ALL, KINDS["sgd"], ranks=2)
    grads = draw(0, ranks=2)
    grads[1]["0.weight"][0, 0] = torch.inf
    ours.exchange(grads)
    for rank in ours.ranks:
        for each in rank.weights.values():
            assert each.grad is not None
            each.grad.clamp_(-1, 1)
    ours.step()
    ours.check_equal()
    assert all(each.isfinite().all() for each in ours.weights.values())


@pytest.mark.parametrize("spec", ["sign", "sdagc", SPEC])
def test_several_optimizers_and_momenta_resume_to_the_bit(spec: str) -> None:
    """Also the factor of Adam's noise, which 30 steps have found."""

    def optimizers(weights: Any) -> list[optim.Optimizer]:
        first, second, *others = weights
        groups: list[dict[str, Any]] = [{"params": [first], "momentum": 0.5}, {"params": [second]}]
        return [optim.SGD(groups, 0.01, momentum=0.9), optim.AdamW(others, 0.01)]

    ours = Replicas(spec, optimizers, ranks=2).train(30)
    again = ours.resumed()
    again.train(3, first=30).ends_as(ours.train(3, first=30), 0, 0)
