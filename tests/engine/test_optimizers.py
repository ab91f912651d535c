"""The optimizer behind a session: found at its first step, asked for rates, checked for two momenta and lost parameters."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from gradcomp.engine.context import UNKNOWN
from gradcomp.engine.optimizers.check import OptimizerCheck, check_momentum, rates_of
from gradcomp.engine.parameters import Parameters
from gradcomp.spec import make


def network() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def give_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)


def checked(model: torch.nn.Module, given: torch.optim.Optimizer | None = None) -> tuple[OptimizerCheck, list[Any]]:
    found: list[Any] = []
    check = OptimizerCheck(Parameters(model.named_parameters()), given, found.append)
    check.note_exchange()
    return check, found


def exchange_and_step(check: OptimizerCheck, optimizer: torch.optim.Optimizer) -> None:
    check.note_exchange()
    optimizer.step()


def test_a_momentum_that_would_act_twice_is_refused() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"the momentum 0\.9 of topk:momentum=0.9 and the optimizer's own would act twice"):
        check_momentum(make("topk:momentum=0.9"), SGD(model.parameters(), lr=1, momentum=0.9))
    check_momentum(make("topk:momentum=0.9"), SGD(model.parameters(), lr=1))
    check_momentum(make("topk"), SGD(model.parameters(), lr=1, momentum=0.9))


def test_the_optimizer_is_found_at_its_first_step() -> None:
    model, other = network(), network()
    alive, found = checked(model)
    SGD(other.parameters(), lr=1).step()
    assert not found
    own = SGD(model.parameters(), lr=1)
    own.step()
    own.step()
    assert found == [own]
    assert alive.exchanged


def test_an_optimizer_that_is_refused_is_refused_at_every_step_and_changes_no_weight() -> None:
    model = network()
    give_gradients(model)
    before = model[0].weight.detach().clone()

    def refuse(optimizer: Any) -> None:
        raise ValueError("refused")

    check = OptimizerCheck(Parameters(model.named_parameters()), None, refuse)
    check.note_exchange()
    optimizer = SGD(model.parameters(), lr=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_an_optimizer_that_steps_replaces_the_given_one_if_it_trains_as_much() -> None:
    """hvd.DistributedOptimizer makes another object, with the same groups until a state is loaded."""
    model = network()
    given, part, whole = (SGD(each.parameters(), lr=rate) for each, rate in ((model, 1.0), (model[0], 2.0), (model, 3.0)))
    check, found = checked(model, given)
    part.step()
    assert check.optimizer is given and check.rates(["0.weight"]) == (1.0,)
    exchange_and_step(check, whole)
    assert check.optimizer is whole and found == [part, whole] and check.rates(["0.weight"]) == (3.0,)


def test_sessions_come_and_go_while_optimizers_step() -> None:
    """If a hook were removed while torch goes through its hooks, the step would break."""
    ended: list[Any] = [checked(network())[0] for _ in range(3)]
    handle = register_optimizer_step_pre_hook(lambda *_: ended.clear())
    hooks = len(_global_optimizer_pre_hooks)
    model = network()
    alive, found = checked(model)
    optimizer = SGD(model.parameters(), lr=1)
    optimizer.step()
    handle.remove()
    gc.collect()
    assert found == [optimizer]
    assert len(_global_optimizer_pre_hooks) == hooks - 1
    assert alive.exchanged


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer= has none of the model's parameters; pass the optimizer that trains them"):
        checked(network(), SGD(network().parameters(), lr=1))


@pytest.mark.parametrize("given", [True, False])
def test_a_parameter_unfrozen_later_is_found_once_it_has_a_gradient(given: bool) -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=1)
    check, _ = checked(model, optimizer if given else None)
    give_gradients(model)
    exchange_and_step(check, optimizer)
    model[0].weight.requires_grad_(True)
    exchange_and_step(check, optimizer)
    give_gradients(model)
    before = model[1].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"^'0.weight' of shape \(2, 2\) was unfrozen or added .* the replicas drift apart"):
        exchange_and_step(check, optimizer)
    assert torch.equal(model[1].weight, before)


@pytest.mark.parametrize("given", [True, False])
def test_a_parameter_added_later_is_found_once_it_has_a_gradient(given: bool) -> None:
    model, added = network(), torch.nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=1)
    check, _ = checked(model, optimizer if given else None)
    give_gradients(model)
    exchange_and_step(check, optimizer)
    optimizer.add_param_group({"params": added.parameters()})
    exchange_and_step(check, optimizer)
    give_gradients(added)
    with pytest.raises(RuntimeError, match=r"^a parameter of shape \(1, 3\) was unfrozen or added"):
        exchange_and_step(check, optimizer)


def test_a_session_that_was_replaced_leaves_the_steps_of_the_next_one_alone() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    first = SGD(model.parameters(), lr=1)
    old, _ = checked(model, first)
    give_gradients(model)
    exchange_and_step(old, first)
    model[0].weight.requires_grad_(True)
    second = SGD(model.parameters(), lr=1)
    new, found = checked(model)
    give_gradients(model)
    exchange_and_step(new, second)
    assert old.optimizer is first and found == [second]


def test_every_optimizer_of_the_parameters_is_checked_before_it_changes_any() -> None:
    model = network()
    alive, found = checked(model)
    parts = [SGD(part.parameters(), lr=1) for part in model]
    for optimizer in (*parts, *parts):
        optimizer.step()
    assert found == parts
    assert alive.exchanged


def test_parameters_that_were_exchanged_from_the_start_may_come_to_an_optimizer_later() -> None:
    model = network()
    head = SGD(model[1].parameters(), lr=1)
    check, found = checked(model, head)
    give_gradients(model)
    exchange_and_step(check, head)
    head.add_param_group({"params": model[0].parameters()})
    exchange_and_step(check, head)
    whole = SGD(model.parameters(), lr=1)
    exchange_and_step(check, whole)
    assert check.optimizer is whole and found == [whole]


def test_a_model_with_a_session_of_its_own_may_join_an_optimizer() -> None:
    model, other = network(), network()
    optimizer = SGD(model.parameters(), lr=1)
    check, _ = checked(model, optimizer)
    others, _ = checked(other)
    give_gradients(model)
    exchange_and_step(check, optimizer)
    optimizer.add_param_group({"params": other.parameters()})
    give_gradients(other)
    exchange_and_step(check, optimizer)
    assert others.exchanged


def test_an_optimizer_that_was_found_may_go() -> None:
    model = network()
    alive, found = checked(model)
    optimizer = SGD(model.parameters(), lr=1)
    optimizer.step()
    assert found.pop() is optimizer
    left = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert left() is None
    assert alive.exchanged


def test_another_models_parameters_in_the_same_optimizer_are_none_of_its_business() -> None:
    model, other = network(), network()
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=1)
    check, _ = checked(model, optimizer)
    give_gradients(model)
    give_gradients(other)
    exchange_and_step(check, optimizer)
    assert check.optimizer is optimizer


def test_rates_are_those_of_the_moment() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
    optimizer = SGD(groups, lr=0.1)
    rates = rates_of(optimizer, model.named_parameters())
    names = ["0.weight", "1.bias"]
    assert rates(names) == (0.5, 0.1)
    optimizer.param_groups[0]["lr"] = 0.25
    assert rates(names) == (0.25, 0.1)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.125
    optimizer.load_state_dict(state)  # replaces the groups
    optimizer.param_groups[1]["lr"] = 0.0625
    assert rates(names) == (0.125, 0.0625)
    optimizer.param_groups[1]["lr"] = torch.tensor(0.5)
    assert rates(names) == (0.125, 0.5)
    few = SGD(model[0].parameters(), lr=0.1)
    rates = rates_of(few, model.named_parameters())
    assert rates(names) == (0.1, UNKNOWN)
    few.add_param_group({"params": model[1].parameters(), "lr": 0.5})
    assert rates(names) == (0.1, 0.5)


def test_the_checks_of_a_session_end_once_another_one_exchanges_its_parameters() -> None:
    """An attach() that is refused after its session was made must not silence the session before."""
    model = network()
    give_gradients(model)
    first, found = checked(model)
    second = OptimizerCheck(Parameters(model.named_parameters()), None, lambda optimizer: None)
    optimizer = SGD(model.parameters(), lr=1)
    exchange_and_step(first, optimizer)
    assert found == [optimizer]
    exchange_and_step(second, SGD(model.parameters(), lr=1))
    assert len(found) == 1
