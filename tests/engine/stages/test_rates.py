"""Learning rates of residuals: weights move by the rate that each gradient came with, whenever it is sent."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from training import Named, Training, draw, mean

import gradcomp
from gradcomp.native.extension import LARGEST
from gradcomp.native.kernels import gradients

SPECS = [
    "topk:ratio=0.05",
    "topk:ratio=0.05,wire=exact,route=split",
    "sdagc:lam=2,small=none",
    "gtopk:ratio=0.05",
    "orq:sigmas=1.5,feedback=true",
]
SHAPES = {"a": (40, 30), "b": (50,)}
STEPS, RANKS = 12, 2

# Rates of the two groups in each step: a warm-up and a fall, alike; steps; restarts.
SCHEDULES: dict[str, list[tuple[float, float]]] = {
    "alike": [(0.1 * f, 0.3 * f) for f in (0.1, 0.4, 1, 1, 0.7, 0.7, 0.3, 0.1, 0.01, 0.01, 2, 1)],
    "steps": [(0.1 / 10 ** (step // 4), 0.3 / 10 ** (step // 4)) for step in range(STEPS)],
    "zeros": [(f, 3 * f) for f in (0.0, 0.0, 0.1, 0.1, 0.0, 0.0, 0.05, 0.01, 0.0, 0.02, 0.0, 0.01)],
    "restarts": [(0.1 * 0.2 ** (step % 4), 0.1 * 0.2 ** (step % 4)) for step in range(STEPS)],
    "one leaps": [(0.1, 0.0003 if step < 7 else 0.3) for step in range(STEPS)],
    "one at zero": [(0.1, 0.0 if step in (0, 1, 4, 5, 9) else 0.3) for step in range(STEPS)],
}
UNLIKE = {
    "fall": [(0.1, 0.3 if step < 5 else 0.003) for step in range(STEPS)],
    "swing": [(0.1, 0.03 if step % 2 else 0.3) for step in range(STEPS)],
}


def set_rates(training: Training, *rates: float) -> None:
    for group, rate in zip(training.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def of_groups(weights: Any) -> SGD:
    """Make an optimizer with a group for each layer."""
    return SGD([{"params": [each]} for each in weights], lr=1.0)


def test_a_layer_of_rate_0_takes_no_place_from_others(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entries, the largest by far, leave the residual after they were noted as large."""
    monkeypatch.setattr(gradients, "LEAST_BY_PEAKS", 0)
    weights = {name: torch.nn.Parameter(torch.zeros(20_000, device=device)) for name in ("a", "b")}
    optimizer = SGD([{"params": [weights["a"]], "lr": 0.1}, {"params": [weights["b"]], "lr": 0.0}])
    shapes, known = dict.fromkeys(weights, (20_000,)), {"optimizer": optimizer, "named_parameters": weights.items()}
    simulation = gradcomp.Simulation("topk:ratio=0.002", shapes, 1, device=device, **known)
    own = torch.randn(20_000, device=device)
    update = simulation.step([{"a": own, "b": 10 * torch.randn(20_000, device=device)}])["a"]
    assert set(update.nonzero().flatten().tolist()) == set(own.abs().topk(80).indices.tolist())


def moved(spec: str, rates: list[tuple[float, float]], change: str = "", known: bool = True) -> tuple[Named, ...]:
    """Return how far weights moved, their residuals, both as weights, and how far plain SGD moves them.

    known: the exchange knows the optimizer, and with it the rates.
    """
    ours, theirs = (Training(each, of_groups, SHAPES, RANKS, 0) for each in (spec if known else None, None))
    simulation = ours.simulation if known else gradcomp.Simulation(spec, SHAPES, RANKS)
    for step, of_layers in enumerate(rates):
        for training in (ours, theirs):
            set_rates(training, *of_layers)
        if change and step == len(rates) // 2:
            simulation.change(change)
        grads = draw(step, SHAPES, RANKS)
        ours.apply(simulation.step(grads))
        theirs.step(grads)
    left = mean([simulation.residual(rank) for rank in range(RANKS)])
    waits = {name: -rate * left[name] for name, rate in zip(SHAPES, rates[-1], strict=True)}
    return {name: each.detach() for name, each in ours.weights.items()}, waits, theirs.weights  # type: ignore[return-value]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("spec", SPECS)
def test_weights_move_by_the_rates_of_the_gradients(spec: str, schedule: str) -> None:
    rates = SCHEDULES[schedule]
    ours, waits, meant = moved(spec, rates)
    for name in SHAPES:
        torch.testing.assert_close(ours[name] + waits[name], meant[name], rtol=1e-4, atol=1e-5)
        assert waits[name].abs().max() > 0.001, "something waits indeed"
    ours, waits, meant = moved(spec, rates, known=False)
    assert any((ours[name] + waits[name] - meant[name]).abs().max() > 0.01 for name in SHAPES)


@pytest.mark.parametrize("schedule", ["alike", "one leaps"])
def test_a_decay_comes_on_top_of_the_rates(schedule: str) -> None:
    """As weights, the decayed residual and the gradient are in the residual and the update."""
    ours = Training("topk:ratio=0.05,wire=exact,decay=0.5", of_groups, SHAPES, RANKS, 0)
    simulation, left, last = ours.simulation, {name: torch.zeros(SHAPES[name]) for name in SHAPES}, dict.fromkeys(SHAPES, 0.0)
    for step, rates in enumerate(SCHEDULES[schedule]):
        set_rates(ours, *rates)
        grads = draw(step, SHAPES, RANKS)
        update = simulation.step(grads)
        ours.apply(update)
        after = mean([simulation.residual(rank) for rank in range(RANKS)])
        for name, rate in zip(SHAPES, rates, strict=True):
            wanted = 0.5 * last[name] * left[name] + rate * mean(grads)[name]
            torch.testing.assert_close(rate * (after[name] + update[name]), wanted, rtol=1e-4, atol=1e-6)
            last[name] = rate
        left = after


@pytest.mark.parametrize("change", ["sdagc:lam=2", "topk:ratio=0.02"])
def test_a_change_of_the_spec_keeps_the_rates(change: str) -> None:
    """The rates change in the same step."""
    falls = [(0.1, 0.3) if step < 5 else (0.01, 0.03) for step in range(10)]
    ours, waits, meant = moved("topk:ratio=0.05", falls, change)
    for name in SHAPES:
        torch.testing.assert_close(ours[name] + waits[name], meant[name], rtol=1e-4, atol=1e-5)


def test_a_layer_without_a_residual_does_not_cost_the_others_their_rates() -> None:
    falls = [(0.1, 0.3) if step < 5 else (0.01, 0.03) for step in range(10)]
    ours, waits, meant = moved("topk:ratio=0.05; b=dense", falls, "topk:ratio=0.05")
    torch.testing.assert_close(ours["a"] + waits["a"], meant["a"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rates", UNLIKE)
def test_rates_that_change_unlike_leave_residuals_alone(rates: str) -> None:
    """A layer that grew by itself would push the others out of the selection. One that shrinks by turns would wither."""
    given, plain = (moved("topk:ratio=0.05", UNLIKE[rates], known=known) for known in (True, False))
    assert all(torch.equal(given[0][name], plain[0][name]) for name in SHAPES)


@pytest.mark.parametrize("step", [5, 6])
def test_a_frozen_layer_follows_its_own_rate(step: int) -> None:
    """The rate leaps while the layer is frozen, or as it is unfrozen."""
    training = Training("topk:ratio=0.05", of_groups, SHAPES, RANKS, 0)
    left: list[Named] = []
    for i in range(7):
        training.weights["b"].requires_grad_(i not in (4, 5))
        set_rates(training, 0.1, 0.3 if i >= step else 0.0003)
        training.simulation.step([{**own, **({} if i < 4 else {"b": torch.zeros(50)})} for own in draw(i, SHAPES, RANKS)])
        left.append(mean([training.simulation.residual(rank) for rank in range(RANKS)]))
    assert left[3]["b"].abs().max() > 0.1
    torch.testing.assert_close(left[6]["b"], 0.001 * left[3]["b"])


class Normalised(SGD):
    """Moves weights by a length of its own, as LARS does, whatever the length of the update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(group["lr"] * each.grad / (each.grad.norm() + 1e-9))


def one_layer(optimizer_of: Any, spec: str = "topk:ratio=0.01,wire=exact", lr: float = 0.1) -> Training:
    """Return a training in which all but the largest of 100 entries wait after a step."""
    training = Training(spec, partial(optimizer_of, lr=lr), {"w": (100,)}, size=0)
    training.simulation.step([{"w": torch.arange(1.0, 101)}])
    return training


def after_rate(training: Training, *rates: float) -> tuple[Named, Named]:
    """Return the residuals, and those after a step with these rates and no gradients, together with its update."""
    before = training.simulation.residual(0)
    set_rates(training, *rates)
    update = training.simulation.step([{name: torch.zeros(each.shape) for name, each in training.weights.items()}])
    return before, {name: left + update[name] for name, left in training.simulation.residual(0).items()}


def test_rates_without_use_are_forgotten() -> None:
    training = one_layer(SGD)
    set_rates(training, 0.001)
    training.simulation.step([{"w": torch.zeros(100, dtype=torch.float16)}])  # follows no rate
    torch.testing.assert_close(*after_rate(training, 0.001))


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adam])
def test_an_optimizer_that_squares_updates_gets_them_as_they_were(kind: Any) -> None:
    torch.testing.assert_close(*after_rate(one_layer(kind, "topk:ratio=0.01,wire=exact,momentum=0"), 0.001))


@pytest.mark.parametrize("kind", [SGD, Normalised])
def test_residuals_grow_only_for_an_optimizer_that_is_linear(kind: Any) -> None:
    before, after = after_rate(one_layer(kind), 0.01)
    assert (after["w"].sum() / before["w"].sum()).item() == pytest.approx(10 if kind is SGD else 1)


@pytest.mark.parametrize("other", ["frozen rate", "another optimizer"])
def test_a_layer_whose_rate_is_unknown_does_not_follow_the_others(other: str) -> None:
    """Its residual is for a rate that nobody knows, or for the last one that was not 0."""
    all_known = other == "frozen rate"
    training = Training(
        "topk:ratio=0.01,wire=exact,momentum=0",
        lambda weights: SGD([{"params": [each]} for each in [*weights][: 1 + all_known]], lr=0.1),
        {"a": (100,), "b": (100,)},
    )
    training.simulation.step([{name: torch.arange(1.0, 101) for name in "ab"}])
    before, after = after_rate(training, *([0.01, 0.0] if all_known else [0.01]))
    torch.testing.assert_close(after["b"].sum(), before["b"].sum())
    if all_known:
        assert training.layers("rates")[0]["rate"] == {"a": 0.01, "b": 0.1}, "the rate that b's residual is for was kept"


@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adamw"])
def test_steps_with_the_rate_0_lose_nothing(kind: str) -> None:
    """The momentum goes on in them. Neither residuals nor their gradients are sent. AdamW is torch's with one rank."""
    optimizer_of: Any = {
        "sgd": partial(SGD, lr=0.1, momentum=0.9),
        "nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        "adamw": partial(AdamW, lr=0.1, weight_decay=0),
    }[kind]
    # Everything is sent of the decay, which depends on the weights.
    spec = "topk:ratio=1,wire=exact" if kind == "nesterov" else "sign"
    ours, theirs = (Training(each, optimizer_of, {"w": (400,)}, size=0) for each in (spec, None))
    for step in range(20):
        for training in (ours, theirs):
            set_rates(training, 0.0 if step in (0, 1, 7, 8, 9, 15) else 0.1)
            training.train(1, step)
    found = ours.weights["w"] - 0.1 * ours.simulation.residual(0)["w"]
    torch.testing.assert_close(found, theirs.weights["w"], rtol=1e-4, atol=1e-5)


def test_a_step_with_the_rate_0_masks_no_momentum() -> None:
    training = Training("topk:ratio=0.05", partial(SGD, lr=0.1, momentum=0.5), {"w": (400,)}, size=0).train(2)
    before = training.layers("sgd")[0]["velocity"]["w"].clone()
    set_rates(training, 0.0)
    training.train(1, 2)
    torch.testing.assert_close(training.layers("sgd")[0]["velocity"]["w"], draw(2, {"w": (400,)})[0]["w"] + 0.5 * before)


def test_a_rate_of_zero_changes_nothing() -> None:
    """Residuals are meant for the last rate before it, and keep that."""
    training = one_layer(SGD, lr=0.4)
    for rate, factor in ((0.0, 1), (0.2, 2), (0.0, 1), (0.0, 1), (0.4, 0.5), (1e-30, 4e29), (float("inf"), 1), (0.4, 2.5e-30)):
        before, after = after_rate(training, rate)
        torch.testing.assert_close(after["w"], (factor * before["w"]).clamp(max=LARGEST))


@pytest.mark.parametrize("leaps", [False, True])
def test_a_saved_state_holds_the_rates(leaps: bool) -> None:
    """And their means, which a leap is compared with."""
    whole = Training("topk:ratio=0.02", lambda w: AdamW([{"params": [each]} for each in w], lr=0.1), SHAPES, size=0)
    trainings = [whole]
    for step in range(8):
        if step == 6:
            trainings.append(whole.resumed("topk:ratio=0.02"))
        for training in trainings:
            rate = 0.1 / (1 + step)
            set_rates(training, rate, (1.0, 0.01, 0.01, 0.02, 0.01, 0.02, 0.5, 3.9)[step] if leaps else rate)
            training.train(1, step)
    whole.ends_as(trainings[1], 0, 0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rates_are_loaded_by_layer(ranks: int) -> None:
    """Into other buckets, and on another number of ranks."""
    spec = "topk:ratio=0.05,wire=exact"
    first = Training(spec, partial(SGD, lr=0.1), SHAPES, 2)
    first.simulation.step(draw(0, SHAPES, 2))
    second = Training(spec, partial(SGD, lr=0.001), SHAPES, ranks, bucket_mb=0.0001)
    second.simulation.load_state_dict(first.simulation.state_dict())
    before = _sums(second)
    update = second.simulation.step([{}] * ranks)
    after = _sums(second)
    for name in SHAPES:
        torch.testing.assert_close(after[name] + ranks * update[name], 100 * before[name], rtol=1e-4, atol=1e-4)


def _sums(training: Training) -> Named:
    every = [training.simulation.residual(rank) for rank in range(training.ranks)]
    return {name: torch.stack([own[name] for own in every]).sum(0) for name in training.shapes}


@pytest.mark.parametrize("rates", [{"a": -1.0}, {"a": "much"}, {"a": float("inf")}, [0.1], None])
def test_damaged_rates_are_refused(rates: Any) -> None:
    simulation = gradcomp.Simulation("topk", SHAPES, 1)
    simulation.step(draw(0, SHAPES))
    state = simulation.state_dict()
    state["of_rank"]["0"]["layers"]["rates"]["rate"] = rates
    with pytest.raises(ValueError, match=r"rate|a="):
        gradcomp.Simulation("topk", SHAPES, 1).load_state_dict(state)
