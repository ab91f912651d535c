"""momentum=auto with Adam's kind: each rank makes directions of its own gradients, and the ranks exchange them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from adam_cases import EXACT, LEFT_TO_TORCH, SETTINGS, STEPS, gradient, made, net, same, simulation_of, step, train
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("spec", EXACT)
@pytest.mark.parametrize("case", SETTINGS)
def test_with_everything_sent_training_is_torchs_own(spec: str, case: str, ranks: int) -> None:
    ours, optimizer, simulation = train(spec, case, ranks)
    same(ours, train(None, case)[0])
    assert simulation is not None
    has_moments = all("second" in share["layers"].get("adam", {}) for share in simulation.state_dict()["of_rank"].values())
    assert has_moments == (case not in LEFT_TO_TORCH)
    assert bool(optimizer.state) == (case in LEFT_TO_TORCH), "the optimizer keeps no moments beside the ranks' own"


def test_the_weight_decay_of_each_group_acts_on_it() -> None:
    def prepared() -> tuple[nn.Module, Optimizer]:
        model = net()
        (a, b, *rest) = model.parameters()
        groups: Any = [{"params": [a], "weight_decay": 0.3}, {"params": [b], "lr": 0.1}, {"params": rest, "weight_decay": 0}]
        return model, AdamW(groups, lr=0.01)

    ours, optimizer = prepared()
    theirs, plain = prepared()
    simulation = simulation_of(EXACT[0], ours, optimizer)
    for number in range(STEPS):
        step(ours, optimizer, simulation, number)
        step(theirs, plain, None, number)
    same(ours, theirs)


@pytest.mark.parametrize("case", ["adamw", "betas"])
def test_a_schedule_of_rate_and_betas_is_followed(case: str) -> None:
    ends = []
    for spec in (EXACT[0], None):
        model = net()
        optimizer = made(case, model)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
        simulation = None if spec is None else simulation_of(spec, model, optimizer)
        for number in range(STEPS):
            step(model, optimizer, simulation, number)
            schedule.step()
        ends.append(model)
    same(*ends)


class OnDevice(Tensor):
    """A rate on a GPU: nobody may wait for its value. As a part of other arithmetic it is an ordinary tensor."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (Tensor.__float__, Tensor.item, Tensor.__bool__), "this waits for the device"
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.mark.parametrize("maximize", [False, True])
def test_a_rate_on_the_device_is_not_waited_for(maximize: bool) -> None:
    ends = []
    for rate, spec in ((torch.tensor(0.02).as_subclass(OnDevice), EXACT[0]), (torch.tensor(0.02), None)):
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.02, weight_decay=0.1, maximize=maximize)
        optimizer.param_groups[0]["lr"] = rate if spec else 0.02
        simulation = None if spec is None else simulation_of(spec, model, optimizer)
        for number in range(STEPS):
            step(model, optimizer, simulation, number)
        ends.append(model)
    same(*ends)


@pytest.mark.parametrize("case", ["adamw", "betas"])
def test_loaded_moments_are_gone_on_with(case: str) -> None:
    """Torch's training goes on with gradcomp from torch's own checkpoint."""
    half, trained, _ = train(None, case)
    whole, optimizer = copy.deepcopy(half), None
    ends = []
    for spec in (EXACT[0], None):
        model = copy.deepcopy(whole)
        optimizer = made(case, model)
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
        simulation = None if spec is None else simulation_of(spec, model, optimizer)
        for number in range(STEPS, 2 * STEPS):
            step(model, optimizer, simulation, number)
        ends.append(model)
    same(*ends)


def test_directions_are_not_carried_over_as_gradients() -> None:
    model, optimizer, simulation = train("topk:ratio=0.05", "adamw", ranks=2)
    assert simulation is not None
    simulation.change("topk:ratio=0.2")
    assert any(bool(each.any()) for each in simulation.residual(0).values())
    simulation.change("topk:ratio=0.2,momentum=0")
    assert not any(bool(each.any()) for each in simulation.residual(0).values())
    step(model, optimizer, simulation, 50, 2)
    assert optimizer.state, "the optimizer has its moments again"


def test_gradients_are_shown_again_and_a_closure_is_refused() -> None:
    model = net()
    optimizer = made("adamw", model)
    simulation = simulation_of("topk:ratio=0.5", model, optimizer)
    updates = simulation.step([gradient(0, model)])
    for name, parameter in model.named_parameters():
        parameter.grad = updates[name].clone()
    with pytest.raises(RuntimeError, match=r"step\(closure\) cannot work with momentum=auto.*momentum=0"):
        optimizer.step(lambda: 0.0)
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, updates[name])


def test_a_parameter_without_a_gradient_stays() -> None:
    model = net()
    optimizer = made("adamw", model)
    simulation = simulation_of("topk:ratio=1", model, optimizer)
    before = [each.detach().clone() for each in model.parameters()]
    updates = simulation.step([gradient(0, model)])
    _, *others = model.named_parameters()
    for name, parameter in others:
        parameter.grad = updates[name].clone()
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [False, True, True, True]


@pytest.mark.parametrize("case", ["adamw", "sgd"])
def test_a_simulation_beside_a_training_leaves_it_alone(case: str) -> None:
    """The optimizer steps with gradients that are not the simulation's updates: it keeps its moments, and uses them."""
    ends = []
    for beside in (True, False):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) if case == "sgd" else made(case, model)
        simulation = simulation_of("topk:ratio=0.1", model, optimizer, 2) if beside else None
        for number in range(STEPS):
            if simulation is not None:
                simulation.step([gradient(1000 + number + rank, model) for rank in range(2)])
            step(model, optimizer, None, number)
        ends.append(model)
        assert optimizer.state
    same(*ends)


def test_updates_may_be_set_as_gradients_or_copied() -> None:
    ends = []
    for copies in (True, False):
        model = net()
        optimizer = made("adamw", model)
        simulation = simulation_of(EXACT[0], model, optimizer)
        for number in range(STEPS):
            for name, update in simulation.step([gradient(number, model)]).items():
                model.get_parameter(name).grad = update.clone() if copies else update
            optimizer.step()
            optimizer.zero_grad()
        ends.append(model)
        assert not optimizer.state
    same(*ends)


@pytest.mark.parametrize("case", ["adamw", "betas"])
@pytest.mark.parametrize("size", [1e15, 1e18, 1e20, 1e25, 3e38])
def test_one_huge_gradient_moves_no_weight_further_than_torch_does(case: str, size: float) -> None:
    """A gradient with an infinite square counts as 0. In torch it moves nothing either, and the entry stands still for ever."""
    ours, theirs = net(), net()
    own, torchs = made(case, ours), made(case, theirs)
    simulation = simulation_of(EXACT[0], ours, own)
    for number in range(STEPS):
        grads = gradient(number, ours)
        if number == STEPS // 2:
            grads["0.weight"][1, 2] = size
        for model, optimizer, updates in ((ours, own, simulation.step([grads])), (theirs, torchs, grads)):
            for name, parameter in model.named_parameters():
                parameter.grad = updates[name].clone()
            optimizer.step()
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            apart = (one - other).abs()
            if name == "0.weight":
                assert apart[1, 2] <= 0.01 * STEPS  # the rate, in each step
                apart[1, 2] = 0
            assert apart.max() < 1e-4, (name, number)
