"""The optimizer behind a session: found at its first step, asked for rates, checked for two momenta and lost parameters."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.optimizer import _global_optimizer_pre_hooks

from gradcomp.engine.optimizers import OptimizerWatch, check_momentum, rates_of
from gradcomp.engine.parameters import Parameters
from gradcomp.spec import make


def network() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def give_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)


def watched(model: torch.nn.Module, given: torch.optim.Optimizer | None = None) -> tuple[OptimizerWatch, list[Any]]:
    found: list[Any] = []
    return OptimizerWatch(Parameters(model.named_parameters()), given, found.append), found


def test_a_momentum_that_would_act_twice_is_refused() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"the momentum 0\.9 of topk:momentum=0.9 and the optimizer's own would act twice"):
        check_momentum(make("topk:momentum=0.9"), SGD(model.parameters(), lr=1, momentum=0.9))
    check_momentum(make("topk:momentum=0.9"), SGD(model.parameters(), lr=1))
    check_momentum(make("topk"), SGD(model.parameters(), lr=1, momentum=0.9))


def test_the_optimizer_is_found_at_its_first_step() -> None:
    model, other = network(), network()
    watch, found = watched(model)
    SGD(other.parameters(), lr=1).step()
    assert watch.optimizer is None and not found
    own, later = SGD(model.parameters(), lr=1), SGD(model.parameters(), lr=1)
    own.step()
    later.step()
    assert watch.optimizer is own and found == [own]


def test_an_optimizer_that_is_refused_is_refused_at_every_step_and_changes_no_weight() -> None:
    model = network()
    give_gradients(model)
    before = model[0].weight.detach().clone()

    def refuse(optimizer: Any) -> None:
        raise ValueError("refused")

    watch = OptimizerWatch(Parameters(model.named_parameters()), None, refuse)
    optimizer = SGD(model.parameters(), lr=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            optimizer.step()
    assert torch.equal(model[0].weight, before) and watch.optimizer is None


def test_no_hook_outlives_its_watch() -> None:
    gc.collect()
    before = len(_global_optimizer_pre_hooks)
    watch, _ = watched(network())
    assert len(_global_optimizer_pre_hooks) == before + 1
    del watch
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer= has none of the model's parameters; pass the optimizer that trains them"):
        watched(network(), SGD(network().parameters(), lr=1))


@pytest.mark.parametrize("given", [True, False])
def test_a_parameter_unfrozen_later_is_found_once_it_has_a_gradient(given: bool) -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=1)
    watch, _ = watched(model, optimizer if given else None)
    give_gradients(model)
    optimizer.step()
    watch.check_all_exchanged()
    model[0].weight.requires_grad_(True)
    watch.check_all_exchanged()
    give_gradients(model)
    with pytest.raises(RuntimeError, match=r"^'0.weight' of shape \(2, 2\) was unfrozen or added .* the replicas drift apart"):
        watch.check_all_exchanged()


@pytest.mark.parametrize("given", [True, False])
def test_a_parameter_added_later_is_found_once_it_has_a_gradient(given: bool) -> None:
    model, added = network(), torch.nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=1)
    watch, _ = watched(model, optimizer if given else None)
    give_gradients(model)
    optimizer.step()
    optimizer.add_param_group({"params": added.parameters()})
    watch.check_all_exchanged()
    give_gradients(added)
    with pytest.raises(RuntimeError, match=r"^a parameter of shape \(1, 3\) was unfrozen or added"):
        watch.check_all_exchanged()


def test_another_models_parameters_in_the_same_optimizer_are_none_of_its_business() -> None:
    model, other = network(), network()
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=1)
    watch, _ = watched(model, optimizer)
    give_gradients(model)
    give_gradients(other)
    watch.check_all_exchanged()


def test_rates_are_those_of_the_moment() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
    optimizer = SGD(groups, lr=0.1)
    rate = rates_of(optimizer, model.named_parameters())
    assert rate("0.weight") == 0.5 and rate("1.bias") == 0.1
    optimizer.param_groups[0]["lr"] = 0.25
    assert rate("0.weight") == 0.25
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.125
    optimizer.load_state_dict(state)  # replaces the groups
    optimizer.param_groups[1]["lr"] = 0.0625
    assert rate("0.weight") == 0.125 and rate("1.bias") == 0.0625
    few = SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"does not have the parameter '1\.weight'"):
        rates_of(few, model.named_parameters())("1.weight")
