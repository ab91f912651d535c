"""Learning rates of what waits: weights move by the rate that each gradient came with, whenever it is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import gradcomp
from gradcomp.native.extension import LARGEST

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
}
UNLIKE = [(0.1, 0.3 if step < 5 else 0.003) for step in range(STEPS)]


def gradient(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def moved(spec: str, rates: list[tuple[float, float]], change: str = "", known: bool = True) -> tuple[dict[str, Tensor], ...]:
    """Return how far weights moved, what waits of it, both as weights, and how far plain SGD moves them.

    known: the exchange knows the optimizer, and with it the rates.
    """
    weights = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = SGD([{"params": [each], "lr": 1.0} for each in weights.values()], lr=1.0)
    told: dict[str, Any] = {"optimizer": optimizer, "named_parameters": weights.items()} if known else {}
    simulation = gradcomp.Simulation(spec, SHAPES, RANKS, **told)
    meant = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step, of_groups in enumerate(rates):
        for group, rate in zip(optimizer.param_groups, of_groups, strict=True):
            group["lr"] = rate
        if change and step == len(rates) // 2:
            simulation.change(change)
        grads = [gradient(rank, step) for rank in range(RANKS)]
        for (name, update), rate in zip(simulation.step(grads).items(), of_groups, strict=True):
            weights[name].grad = update
            meant[name] -= rate * torch.stack([grad[name] for grad in grads]).mean(0)
        optimizer.step()
    left = [simulation.residual(rank) for rank in range(RANKS)]
    waits = {
        name: -rate * torch.stack([each[name] for each in left]).mean(0) for name, rate in zip(SHAPES, rates[-1], strict=True)
    }
    return {name: each.detach() for name, each in weights.items()}, waits, meant


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


@pytest.mark.parametrize("change", ["sdagc:lam=2", "topk:ratio=0.02"])
def test_a_change_of_the_spec_keeps_the_rates(change: str) -> None:
    """The rates change in the same step."""
    falls = [(0.1, 0.3) if step < 5 else (0.01, 0.03) for step in range(10)]
    ours, waits, meant = moved("topk:ratio=0.05", falls, change)
    for name in SHAPES:
        torch.testing.assert_close(ours[name] + waits[name], meant[name], rtol=1e-4, atol=1e-5)


def test_a_layer_that_nothing_waited_of_does_not_cost_the_others_their_rates() -> None:
    falls = [(0.1, 0.3) if step < 5 else (0.01, 0.03) for step in range(10)]
    ours, waits, meant = moved("topk:ratio=0.05; b=dense", falls, "topk:ratio=0.05")
    torch.testing.assert_close(ours["a"] + waits["a"], meant["a"], rtol=1e-4, atol=1e-5)


def test_rates_that_change_unlike_leave_what_waits_alone() -> None:
    """A layer with a factor of its own would push the others out of the selection."""
    given, plain = (moved("topk:ratio=0.05", UNLIKE, known=known) for known in (True, False))
    assert all(torch.equal(given[0][name], plain[0][name]) for name in SHAPES)


def test_rates_without_use_are_forgotten() -> None:
    w = nn.Parameter(torch.zeros(100))
    optimizer = SGD([w], lr=0.1)
    options: dict[str, Any] = {"optimizer": optimizer, "named_parameters": [("w", w)]}
    simulation = gradcomp.Simulation("topk:ratio=0.01,wire=exact", {"w": (100,)}, 1, **options)
    simulation.step([{"w": torch.arange(1.0, 101)}])
    optimizer.param_groups[0]["lr"] = 0.001
    simulation.step([{"w": torch.zeros(100, dtype=torch.float16)}])  # follows no rate
    before = simulation.residual(0)["w"]
    update = simulation.step([{"w": torch.zeros(100)}])["w"]
    torch.testing.assert_close(simulation.residual(0)["w"] + update, before)


class Normalised(SGD):
    """Moves weights by a length of its own, as LARS does, whatever the length of the update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(group["lr"] * each.grad / (each.grad.norm() + 1e-9))


def after_a_fall(kind: Any, spec: str, rate: float) -> tuple[Tensor, Tensor]:
    """Return what waits after a step, and what of it waits or is sent in the next one, under another rate."""
    w = nn.Parameter(torch.zeros(100))
    optimizer = kind([w], lr=0.1)
    options: dict[str, Any] = {"optimizer": optimizer, "named_parameters": [("w", w)]}
    simulation = gradcomp.Simulation(spec, {"w": (100,)}, 1, **options)
    simulation.step([{"w": torch.arange(1.0, 101)}])
    before = simulation.residual(0)["w"]
    optimizer.param_groups[0]["lr"] = rate
    update = simulation.step([{"w": torch.zeros(100)}])["w"]
    return before, simulation.residual(0)["w"] + update


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adam])
def test_an_optimizer_that_squares_updates_gets_them_as_they_were(kind: Any) -> None:
    before, after = after_a_fall(kind, "topk:ratio=0.01,wire=exact,momentum=0", 0.001)
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("kind", [SGD, Normalised])
def test_what_waits_grows_only_for_an_optimizer_that_is_linear(kind: Any) -> None:
    before, after = after_a_fall(kind, "topk:ratio=0.01,wire=exact", 0.01)
    assert (after.sum() / before.sum()).item() == pytest.approx(10 if kind is SGD else 1)


@pytest.mark.parametrize("other", ["frozen rate", "another optimizer"])
def test_a_layer_whose_rate_is_unknown_does_not_follow_the_others(other: str) -> None:
    """Its residual is for a rate that nobody knows, or for the last one that was not 0."""
    weights = {"a": nn.Parameter(torch.zeros(100)), "b": nn.Parameter(torch.zeros(100))}
    trained = [weights["a"], weights["b"]] if other == "frozen rate" else [weights["a"]]
    optimizer = SGD([{"params": [each]} for each in trained], lr=0.1)
    named = list(weights.items())
    simulation = gradcomp.Simulation(
        "topk:ratio=0.01,wire=exact,momentum=0", {"a": (100,), "b": (100,)}, 1, optimizer=optimizer, named_parameters=named
    )
    grads = {name: torch.arange(1.0, 101) for name in weights}
    simulation.step([grads])
    if other == "frozen rate":
        optimizer.param_groups[1]["lr"] = 0.0
    waits = simulation.residual(0)["b"].sum()
    optimizer.param_groups[0]["lr"] = 0.01
    update = simulation.step([{name: torch.zeros(100) for name in weights}])
    torch.testing.assert_close(simulation.residual(0)["b"].sum() + update["b"].sum(), waits)
    if other == "frozen rate":  # the rate that b's residual is for was kept
        bucket = simulation._reducers[0].buckets[0]
        assert dict(zip(bucket.layout.names, bucket.states["rates"].rates or (), strict=True)) == {"a": 0.01, "b": 0.1}


@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adamw"])
def test_steps_with_the_rate_0_lose_nothing(kind: str) -> None:
    """The momentum goes on in them. Neither what waits nor what they find is sent. AdamW is torch's with one rank."""
    theirs, ours = (nn.Parameter(torch.zeros(400)) for _ in range(2))
    made: dict[str, Any] = {
        "sgd": lambda w: SGD([w], lr=0.1, momentum=0.9),
        "nesterov": lambda w: SGD([w], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        "adamw": lambda w: AdamW([w], lr=0.1, weight_decay=0),
    }
    optimizers = [made[kind](w) for w in (ours, theirs)]
    # Everything is sent of the decay, which depends on the weights.
    spec = "topk:ratio=1,wire=exact" if kind == "nesterov" else "sign"
    simulation = gradcomp.Simulation(spec, {"w": (400,)}, 1, optimizer=optimizers[0], named_parameters=[("w", ours)])
    for step in range(20):
        rate = 0.0 if step in (0, 1, 7, 8, 9, 15) else 0.1
        grad = torch.randn(400, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
        ours.grad, theirs.grad = simulation.step([{"w": grad}])["w"], grad
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours - 0.1 * simulation.residual(0)["w"], theirs, rtol=1e-4, atol=1e-5)


def test_a_step_with_the_rate_0_masks_no_momentum() -> None:
    w = nn.Parameter(torch.zeros(400))
    optimizer = SGD([w], lr=0.1, momentum=0.5)
    simulation = gradcomp.Simulation("topk:ratio=0.05", {"w": (400,)}, 1, optimizer=optimizer, named_parameters=[("w", w)])
    velocity = torch.zeros(400)
    for step, rate in enumerate((0.1, 0.1, 0.0)):
        optimizer.param_groups[0]["lr"] = rate
        grad = torch.randn(400, generator=torch.Generator().manual_seed(step))
        state = simulation._reducers[0].buckets[0].states["sgd"]
        velocity = grad + (0.0 if state.velocity is None else 0.5 * state.velocity)
        w.grad = simulation.step([{"w": grad}])["w"]
        optimizer.step()
    assert state.velocity is not None
    torch.testing.assert_close(state.velocity, velocity)


def test_a_rate_of_zero_changes_nothing() -> None:
    """What waits is meant for the last rate before it, and keeps that."""
    w = nn.Parameter(torch.zeros(100))
    optimizer = SGD([w], lr=0.4)
    simulation = gradcomp.Simulation(
        "topk:ratio=0.01,wire=exact", {"w": (100,)}, 1, optimizer=optimizer, named_parameters=[("w", w)]
    )
    simulation.step([{"w": torch.arange(1.0, 101)}])
    for rate, factor in ((0.0, 1), (0.2, 2), (0.0, 1), (0.0, 1), (0.4, 0.5), (1e-30, 4e29), (float("inf"), 1), (0.4, 2.5e-30)):
        before = simulation.residual(0)["w"]
        optimizer.param_groups[0]["lr"] = rate
        update = simulation.step([{"w": torch.zeros(100)}])["w"]
        torch.testing.assert_close(simulation.residual(0)["w"] + update, (factor * before).clamp(max=LARGEST))


def test_a_saved_state_holds_the_rates() -> None:
    def run(saved_at: int | None) -> Tensor:
        w = nn.Parameter(torch.zeros(200))
        optimizer = AdamW([w], lr=0.1)
        options: dict[str, Any] = {"optimizer": optimizer, "named_parameters": [("w", w)]}
        simulation = gradcomp.Simulation("topk:ratio=0.02", {"w": (200,)}, 1, **options)
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            if step == saved_at:
                states = simulation.state_dict()
                simulation = gradcomp.Simulation("topk:ratio=0.02", {"w": (200,)}, 1, **options)
                simulation.load_state_dict(states)
            w.grad = simulation.step([{"w": torch.randn(200, generator=torch.Generator().manual_seed(step))}])["w"]
            optimizer.step()
        return w.detach()

    assert torch.equal(run(None), run(3))


def test_rates_are_loaded_by_layer() -> None:
    """Into other buckets, and on another number of ranks."""
    weights = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = SGD(weights.values(), lr=0.1)
    options: dict[str, Any] = {"optimizer": optimizer, "named_parameters": weights.items()}
    first = gradcomp.Simulation("topk:ratio=0.05,wire=exact", SHAPES, 2, **options)
    first.step([gradient(rank, 0) for rank in range(2)])
    optimizer.param_groups[0]["lr"] = 0.001
    nothing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for ranks in (1, 2, 4):
        second = gradcomp.Simulation("topk:ratio=0.05,wire=exact", SHAPES, ranks, bucket_mb=0.0001, **options)
        second.load_state_dict(first.state_dict())
        before = [second.residual(rank) for rank in range(ranks)]
        update = second.step([nothing] * ranks)
        for name in SHAPES:
            sums = [sum(each[name] for each in left) for left in (before, [second.residual(rank) for rank in range(ranks)])]
            torch.testing.assert_close(sums[1] + ranks * update[name], 100 * sums[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rates", [{"a": -1.0}, {"a": "much"}, {"a": float("inf")}, [0.1], None])
def test_damaged_rates_are_refused(rates: Any) -> None:
    simulation = gradcomp.Simulation("topk", SHAPES, 1)
    simulation.step([gradient(0, 0)])
    state = simulation.state_dict()
    state["of_rank"]["0"]["layers"]["rates"]["rate"] = rates
    with pytest.raises(ValueError, match=r"rate|a="):
        gradcomp.Simulation("topk", SHAPES, 1).load_state_dict(state)
