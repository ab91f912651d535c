"""The moments go back to the optimizer where a new spec leaves them to it, and training goes on as torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradcomp

STEPS, RANKS = 8, 3
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
}
EVERYTHING = "topk:ratio=1,wire=exact"
LEFT, LEVELS = f"{EVERYTHING},momentum=0", "dense:feedback=true,momentum=0"


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def gradients(step: int, model: nn.Module, alike: bool) -> list[dict[str, Tensor]]:
    """Draw all ranks' gradients. Those of Adam are alike: the mean of directions is then Adam's of the mean."""
    torch.manual_seed(100 + step)
    drawn = [{name: torch.randn_like(each) for name, each in model.named_parameters()} for _ in range(RANKS)]
    return [drawn[0]] * RANKS if alike else drawn


def train(case: str, specs: list[str] | None) -> nn.Module:
    """Train with one spec after the other, or with torch alone."""
    kind, settings = OPTIMIZERS[case]
    model = net()
    optimizer = kind(model.parameters(), lr=0.02, **settings)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    named = list(model.named_parameters())
    simulation = (
        None if specs is None else gradcomp.Simulation(specs[0], shapes, RANKS, optimizer=optimizer, named_parameters=named)
    )
    for turn in range(3):
        if simulation is not None and specs is not None and turn:
            simulation.change(specs[turn])
        for step in range(turn * STEPS, (turn + 1) * STEPS):
            grads = gradients(step, model, alike=kind is not torch.optim.SGD)
            mean = {name: torch.stack([own[name] for own in grads]).mean(0) for name in shapes}
            for name, update in (mean if simulation is None else simulation.step(grads)).items():
                model.get_parameter(name).grad = update.clone()
            optimizer.step()
    return model


@pytest.mark.parametrize("specs", [[EVERYTHING, LEFT, LEFT], [EVERYTHING, LEFT, EVERYTHING], [EVERYTHING, LEVELS, EVERYTHING]])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_change_hands_the_moments_back(case: str, specs: list[str]) -> None:
    for own, wanted in zip(train(case, specs).parameters(), train(case, None).parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["sgd", "adamw"])
def test_a_simulation_beside_a_training_hands_nothing_back(case: str) -> None:
    kind, settings = OPTIMIZERS[case]
    ends = []
    for beside in (True, False):
        model = net()
        optimizer = kind(model.parameters(), lr=0.02, **settings)
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        simulation = gradcomp.Simulation(
            EVERYTHING, shapes, RANKS, optimizer=optimizer, named_parameters=list(model.named_parameters())
        )
        for step in range(STEPS):
            if beside:
                simulation.step(gradients(1000 + step, model, False))
            for name, each in gradients(step, model, True)[0].items():
                model.get_parameter(name).grad = each
            optimizer.step()
            if beside and step == STEPS // 2:
                simulation.change(LEFT)
        ends.append(model)
    for own, wanted in zip(*(end.parameters() for end in ends), strict=True):
        assert torch.equal(own, wanted)


def test_settings_that_change_in_mid_training_are_warned_of() -> None:
    """Adam's directions cannot be sent as gradients: what waits is dropped, and the optimizer begins anew."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    simulation = gradcomp.Simulation(
        "topk:ratio=0.1", shapes, RANKS, optimizer=optimizer, named_parameters=list(model.named_parameters())
    )
    simulation.step(gradients(0, model, True))
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "betas": (0.8, 0.9)})
    with pytest.warns(UserWarning, match=r"does not support AdamW.s settings now.* begin anew.*SPEC,momentum=0") as seen:
        simulation.step(gradients(1, model, True))
        simulation.step(gradients(2, model, True))
    assert len(seen) == 1


@pytest.mark.parametrize("nesterov", [False, True])
def test_what_waits_moves_the_weights_as_far_as_it_would_have(nesterov: bool) -> None:
    """Velocities that wait hold the momentum that the optimizer adds from now on."""
    ends = []
    for spec in ("orq:levels=9,feedback=true", None):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.7, nesterov=nesterov)
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        named = list(model.named_parameters())
        simulation = (
            None if spec is None else gradcomp.Simulation(spec, shapes, RANKS, optimizer=optimizer, named_parameters=named)
        )
        for step in range(80):
            if simulation is not None and step == 20:
                simulation.change(LEFT)
            grads = [{name: each * (step < 20) for name, each in own.items()} for own in gradients(step, model, False)]
            mean = {name: torch.stack([own[name] for own in grads]).mean(0) for name in shapes}
            for name, update in (mean if simulation is None else simulation.step(grads)).items():
                model.get_parameter(name).grad = update.clone()
            optimizer.step()
        ends.append(model)
    for own, wanted in zip(*(end.parameters() for end in ends), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_turned_off_nothing_is_left_in_gradcomp(case: str) -> None:
    """As the documentation says: a change to dense without momentum, one step, and the optimizer's state is torch's own."""
    kind, settings = OPTIMIZERS[case]
    model = net()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    optimizer = kind(model.parameters(), lr=0.02, **settings)
    named = dict(model.named_parameters())
    shapes = {name: tuple(each.shape) for name, each in named.items()}
    simulation = gradcomp.Simulation("topk:ratio=0.1", shapes, RANKS, optimizer=optimizer, named_parameters=named.items())

    def step(at: int) -> None:
        for name, update in simulation.step(gradients(at, model, False)).items():
            named[name].grad = update.clone()
        optimizer.step()

    for at in range(5):
        step(at)
    assert any(bool(left.any()) for left in simulation.residual(0).values())
    simulation.change("dense:momentum=0")
    step(5)
    assert not any(bool(left.any()) for rank in range(RANKS) for left in simulation.residual(rank).values())
    kept = "momentum_buffer" if kind is torch.optim.SGD else "exp_avg"
    assert all(bool(optimizer.state[each][kept].any()) for each in model.parameters() if each.numel())
