"""The momentum of an optimizer, hidden while it steps: the residual delivers what it would have delivered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from replicas import Replica, Replicas
from torch import nn, optim
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from training import STEPS, draw, mean

from gradcomp.engine.updates.hidden_momentum import RULES, HiddenMomentum, Momentum, class_of

ALL = "topk:ratio=1,wire=exact"
LEFT = f"{ALL},momentum=0"
# Each class, the settings of its momentum, and those of the same optimizer without it, but with the whole effect.
CLASSES: dict[type, tuple[dict[str, Any], dict[str, Any]]] = {
    SGD: ({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}, {"lr": 0.5, "momentum": 0, "weight_decay": 0.1}),
    RMSprop: ({"lr": 0.01, "momentum": 0.8}, {"lr": 0.05, "momentum": 0}),
    Adam: ({"lr": 0.01, "weight_decay": 0.1}, {"betas": (0.0, 0.999)}),
    AdamW: ({"lr": 0.01, "betas": (0.8, 0.95)}, {"betas": (0.0, 0.95)}),
    NAdam: ({"lr": 0.01}, {"betas": (0.0, 0.999)}),
    RAdam: ({"lr": 0.01}, {"betas": (0.0, 0.999)}),
    Adamax: ({"lr": 0.01}, {"betas": (0.0, 0.999)}),
}
every_class = pytest.mark.parametrize("kind", CLASSES)


def value_of(optimizer: Optimizer) -> float:
    (group,) = optimizer.param_groups
    return group["betas"][0] if "betas" in group else group["momentum"]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(5))]


def made(kind: type, *, hidden: bool = False) -> Any:
    own, without = CLASSES[kind]
    return kind(parameters(), **{**own, **(without if hidden else {})})


def hidden_of(optimizer: Optimizer) -> HiddenMomentum:
    return HiddenMomentum(optimizer, None, [id(each) for group in optimizer.param_groups for each in group["params"]])


# --- Shares


@pytest.mark.parametrize("m", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("nesterov", [False, True])
def test_an_entry_that_is_sent_at_an_age_delivers_what_sgd_has_by_then(m: float, nesterov: bool) -> None:
    """One gradient, at first; what SGD has moved is a share of all that it will."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    sgd = SGD([weight], lr=1 - m, momentum=m, nesterov=nesterov and m > 0)
    shares = Momentum(m, nesterov).shares()
    assert len(shares) == 512 and shares[255] == 1
    for age in range(1, 40):
        weight.grad = torch.full((1,), -float(age == 1), dtype=torch.float64)
        sgd.step()
        if not nesterov:
            assert shares[age] == pytest.approx(float(weight.detach())) and shares[256 + age] == 0
        elif age == 1 and m > 0:  # it came in the step in which it is sent
            assert shares[1] + shares[256 + 1] == pytest.approx(float(weight.detach()))
    delivered, left = 0.0, 1.0  # sent in every step
    moved = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    sgd = SGD([moved], lr=1 - m, momentum=m, nesterov=nesterov and m > 0)
    for step in range(20):
        moved.grad = torch.full((1,), -float(step == 0), dtype=torch.float64)
        sgd.step()
        sent = shares[1] * left + shares[257] * (step == 0)
        delivered, left = delivered + sent, left - sent
        assert delivered == pytest.approx(float(moved.detach()))


def test_what_has_waited_for_longest_is_sent_whole() -> None:
    for nesterov in (False, True):
        shares = Momentum(0.999, nesterov).shares()
        assert shares[255] == 1 and shares[511] == 0 and all(0 <= each <= 1 for each in shares)
        assert shares[1:256] == sorted(shares[1:256])
    assert Momentum().shares()[1:256] == [1.0] * 255, "without a momentum everything is sent"


# --- Which optimizers


def test_exact_classes_alone_hide_theirs() -> None:
    assert {*CLASSES} == {*RULES}
    for kind in CLASSES:
        own = type("Own", (kind,), {})
        assert hidden_of(made(kind)).rule is RULES[kind]
        assert hidden_of(own(parameters(), **CLASSES[kind][0])).rule is None
    others = [optim.Adagrad(parameters()), optim.Adadelta(parameters()), optim.ASGD(parameters()), optim.Rprop(parameters())]
    for each in others:
        assert hidden_of(each).rule is None


def test_horovods_subclass_is_seen_through() -> None:
    """As hvd.DistributedOptimizer makes one: a class of the optimizer's class, with methods of Horovod's."""
    for kind in CLASSES:
        horovods: Any = type(kind.__name__, (kind,), {"skip_synchronize": None})
        optimizer = horovods(parameters(), **CLASSES[kind][0])
        assert class_of(optimizer) is kind and hidden_of(optimizer).rule is RULES[kind]
        own = type("Own", (kind,), {})
        of_own: Any = type("Own", (own,), {"skip_synchronize": None})
        assert hidden_of(of_own(parameters(), **CLASSES[kind][0])).rule is None


@every_class
def test_a_momentum_on_a_device_is_left_to_the_optimizer(kind: type) -> None:
    """Nobody may wait for its value."""
    optimizer = made(kind)
    (group,) = optimizer.param_groups
    value = torch.tensor(value_of(optimizer))
    group.update({"betas": (value, 0.999)} if "betas" in group else {"momentum": value})
    hidden = hidden_of(optimizer)
    before = dict(group)
    hidden.hide()
    assert hidden.rule is None and dict(group) == before and hidden.of(group) == Momentum()


# --- Hidden, and shown again


@every_class
def test_settings_are_hidden_during_a_step_alone(kind: type) -> None:
    optimizer, plain = made(kind), made(kind, hidden=True)
    hidden = hidden_of(optimizer)
    (group,), (wanted,) = optimizer.param_groups, plain.param_groups
    before = dict(group)
    for _ in range(2):
        hidden.hide()
        hidden.hide()  # as a step does that another one calls
        for name in group.keys() - {"params"}:
            assert group[name] == (pytest.approx(wanted[name]) if name == "lr" else wanted[name]), name
        hidden.show()
        hidden.show()
        assert dict(group) == before


@pytest.mark.parametrize("alike", [True, False])
@every_class
def test_with_everything_sent_the_residual_is_a_queue_behind_the_optimizer_without_momentum(kind: type, alike: bool) -> None:
    """The definition in plain torch. Of SGD and RMSprop with one gradient on all ranks it is their own momentum."""
    ours = Replicas(ALL, partial(kind, **CLASSES[kind][0]), ranks=2).train(alike=alike)
    queue = Queue(partial(kind, **{**CLASSES[kind][0], **CLASSES[kind][1]}), value_of(made(kind)))
    queue.train(alike)
    ours.ends_as(queue)
    if kind is SGD or (kind is RMSprop and alike):
        ours.ends_as(Replicas(None, partial(kind, **CLASSES[kind][0]), ranks=2).train(alike=alike))


class Queue:
    """Two ranks' optimizers, of which the mean step waits, and a share of all that waits moves the weights."""

    def __init__(self, optimizer_of: Any, momentum: float):
        self.ranks = [Replica(optimizer_of, draw_shapes(), 0.3, torch.float32) for _ in range(2)]
        self.weights, self.momentum = self.ranks[0].weights, momentum

    def train(self, alike: bool) -> None:
        waits = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        for number in range(STEPS):
            start = {name: weight.detach().clone() for name, weight in self.weights.items()}
            for rank, grads in zip(self.ranks, draw(number, ranks=2, alike=alike), strict=True):
                rank.backward(grads)
                rank.step()
            for name in waits:
                own = [rank.weights[name].detach() for rank in self.ranks]
                waits[name] += start[name] - torch.stack(own).mean(0)
                for each in own:
                    each.copy_(start[name] - (1 - self.momentum) * waits[name])
                waits[name] *= self.momentum


def draw_shapes() -> dict[str, Any]:
    return {name: each.shape for name, each in draw(0)[0].items()}


def test_groups_have_a_momentum_each() -> None:
    def of_groups(weights: Any) -> Optimizer:
        a, b, *rest = weights
        groups: Any = [{"params": [a], "momentum": 0.5}, {"params": [b], "lr": 0.1, "nesterov": True}, {"params": rest}]
        return SGD(groups, lr=0.02, momentum=0.9, weight_decay=0.01)

    for spec in (ALL, f"{ALL},route=split"):
        ours, theirs = (Replicas(each, of_groups, ranks=2) for each in (spec, None))
        ours.train().ends_as(theirs.train())
        assert [group["momentum"] for group in ours.optimizer.param_groups] == [0.5, 0.9, 0.9]


def test_a_number_of_the_spec_is_in_place_of_the_optimizers() -> None:
    for own in (0.0, 0.5):
        ours = Replicas(f"{ALL},momentum=0.9", partial(SGD, lr=0.05, momentum=own), ranks=2).train()
        theirs = Replicas(None, partial(SGD, lr=0.05, momentum=0.9), ranks=2).train()
        ours.ends_as(theirs)
        assert value_of(ours.optimizer) == own


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_momentum_0_leaves_it_to_the_optimizer(kind: type, alike: bool) -> None:
    """Weights move by the mean of the ranks' own steps."""
    optimizer_of = partial(kind, **CLASSES[kind][0])
    ours, queue = Replicas(LEFT, optimizer_of, ranks=2).train(alike=alike), Queue(optimizer_of, 0)
    queue.train(alike)
    ours.ends_as(queue)
    assert not any(left.any() for left in ours.residual().values())


# --- A step that raises an error


class Breaks(Exception):
    pass


def broken(ours: Replicas) -> Callable[[], Any]:
    """Take a step whose closure raises an error."""

    def closure() -> Any:
        raise Breaks

    def broken_step(rank: Replica) -> None:
        try:
            rank.step(closure=closure)
        except Breaks:
            return

    return lambda: ours.each(broken_step)


@every_class
@pytest.mark.parametrize("saves", [False, True])
def test_after_a_step_that_raised_an_error_all_is_shown_again(kind: type, saves: bool) -> None:
    """Before the state is saved, and after the next step. The step that raised moved nothing."""
    ours, theirs = (Replicas(ALL, partial(kind, **CLASSES[kind][0]), ranks=2) for _ in range(2))
    before = {name: value for name, value in ours.optimizer.param_groups[0].items() if name != "params"}
    ours.train(3)
    broken(ours)()
    if saves:
        (saved,) = ours.optimizer.state_dict()["param_groups"]
        assert {name: saved[name] for name in before} == before
    ours.train(3, 3)
    assert {name: value for name, value in ours.optimizer.param_groups[0].items() if name != "params"} == before
    ours.ends_as(theirs.train(6), 0, 0)


# --- Schedules


def one_cycle(ours: Replicas, steps: int) -> list[list[float]]:
    """Train under OneCycleLR. Return the rates and momenta that it has seen."""
    schedules = [optim.lr_scheduler.OneCycleLR(rank.optimizer, 0.1, total_steps=steps + 1) for rank in ours.ranks]
    seen = []
    for number in range(steps):
        ours.train(1, number)
        seen.append([ours.optimizer.param_groups[0]["lr"], value_of(ours.optimizer)])
        for schedule in schedules:
            schedule.step()
    return seen


def test_a_schedule_of_the_momentum_is_followed() -> None:
    """The share of a step is that of its momentum, and SGD's rate is that of the step in which a gradient came."""
    of_sgd = partial(SGD, lr=0.1, momentum=0.9)
    seen = one_cycle(ours := Replicas(ALL, of_sgd, ranks=2), STEPS)
    assert seen == one_cycle(Replicas(None, of_sgd, ranks=2), STEPS) and len({m for _, m in seen}) > 4
    weights = Replica(of_sgd, draw_shapes(), 0.3, torch.float32).weights
    waits = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for number, (rate, m) in enumerate(seen):
        for name, grad in mean(draw(number, ranks=2)).items():
            waits[name] = waits[name] + rate * grad / (1 - m)
            weights[name].data.sub_((1 - m) * waits[name])
            waits[name] = m * waits[name]
    for name, weight in ours.weights.items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5)


def test_a_schedule_of_the_rate_is_torchs_where_the_optimizer_has_its_momentum() -> None:
    for spec, momentum in ((ALL, 0.0), (LEFT, 0.9)):
        both = [Replicas(each, partial(SGD, lr=0.1, momentum=momentum, weight_decay=0.1), ranks=2) for each in (spec, None)]
        for number in range(STEPS):
            for each in both:
                each.set(lr=0.2 / (1 + number))
                each.train(1, number)
        both[0].ends_as(both[1])


# --- Moments of before


@pytest.mark.parametrize("before", ["dense", "half", "blocks"])
@pytest.mark.parametrize("settings", [{}, {"nesterov": True}, {"weight_decay": 0.1}, {"maximize": True, "nesterov": True}])
def test_a_momentum_of_before_a_change_is_delivered_as_torch_delivers_it(before: str, settings: dict[str, Any]) -> None:
    """From gradients to updates in mid-training: with everything sent, SGD goes on as it would have."""
    ours = Replicas(before, partial(SGD, lr=0.05, momentum=0.9, **settings), ranks=2).train(6)
    theirs = Replicas(None, partial(SGD, lr=0.05, momentum=0.9, **settings), ranks=2)
    for name, weight in theirs.weights.items():
        weight.data.copy_(ours.weights[name].detach())
    theirs.optimizer.load_state_dict(ours.states()[0]["optimizers"][0])  # copies
    ours.change(ALL)
    ours.train(8, 6).ends_as(theirs.train(8, 6))
    assert not any(state["momentum_buffer"].any() for state in ours.optimizer.state.values()), "it was delivered once"


def test_a_momentum_is_delivered_also_where_updates_were_exchanged_before() -> None:
    """The optimizer of these is gone, and took along what its steps with a hidden momentum had left."""
    sgd = partial(SGD, lr=0.05, momentum=0.9)
    ours = Replicas("topk:ratio=0.3", sgd, ranks=2).train(3)
    for rank in ours.ranks:
        rank.optimizers = []
    ours.change("dense")
    for rank in ours.ranks:
        rank.optimizers = [sgd(rank.weights.values())]
    theirs = Replicas(None, sgd, ranks=2)
    for name, weight in theirs.weights.items():
        weight.data.copy_(ours.weights[name].detach())
    ours.train(6, 3)
    ours.change(ALL)
    ours.train(8, 9).ends_as(theirs.train(14, 3))


def test_the_momentum_of_torchs_own_checkpoint_is_delivered() -> None:
    theirs = Replicas(None, partial(SGD, lr=0.05, momentum=0.9), ranks=2).train(6)
    ours = Replicas(ALL, partial(SGD, lr=0.05, momentum=0.9), ranks=2)
    for rank in ours.ranks:
        for name, weight in rank.weights.items():
            weight.data.copy_(theirs.weights[name].detach())
        rank.optimizer.load_state_dict(theirs.states()[0]["optimizers"][0])
    ours.train(8, 6).ends_as(theirs.train(8, 6))


@pytest.mark.parametrize("steps", [40, 200])
@pytest.mark.parametrize("kind", [Adam, partial(AdamW, amsgrad=True), NAdam, RAdam, Adamax, RMSprop])
def test_a_first_moment_of_adams_kin_is_the_sum_of_steps_to_come(kind: Any, steps: int) -> None:
    """Those are the steps without a gradient, if the second moment, and corrections by the number of steps, stay."""
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9 if isinstance(kind, partial) else 0.9999), "weight_decay": 0.0}
    if kind is RMSprop:
        settings = {"lr": 0.01, "momentum": 0.8, "alpha": 0.9}
    weight = nn.Parameter(torch.zeros(50))
    optimizer = kind([weight], **settings)
    generator = torch.Generator().manual_seed(0)
    for number in range(steps):
        weight.grad = 1 + 0.01 * torch.randn(50, generator=generator) + 99 * (number == 0)
        optimizer.step()
    now = weight.detach().clone()
    other = nn.Parameter(now.clone())
    without = kind([other], **settings)
    without.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(60):
        other.grad = torch.zeros(50)
        without.step()
        if "exp_avg_sq" in without.state[other]:  # and bias corrections, and the like, of steps
            without.state[other]["exp_avg_sq"].copy_(optimizer.state[weight]["exp_avg_sq"])
            without.state[other]["step"].fill_(steps)
    moment = "momentum_buffer" if kind is RMSprop else "exp_avg"
    ((parameter, step),) = [(each, step.clone()) for each, step in hidden_of(optimizer).take_undelivered()]
    assert parameter is weight and not optimizer.state[weight][moment].any()
    torch.testing.assert_close(step, now - other.detach(), rtol=0.05, atol=0)
