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
from gradcomp.engine.optimizer_view import OptimizerView
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters
from gradcomp.engine.taken_momentum import check_momentum
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make


def network() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


@pytest.fixture
def model() -> Any:
    return network()


def give_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)


def viewed(model: torch.nn.Module, given: torch.optim.Optimizer | None = None, spec: str = "topk") -> Session:
    """A session of a model, whose gradients have been exchanged."""
    network = MemoryNetwork(Board(1), 0, 1)
    session = Session(make(spec), Parameters(model.named_parameters()), network, Options(given), Door())
    session.view.note_exchange()
    return session


def found(session: Session) -> list[torch.optim.Optimizer]:
    """The optimizers of the session's parameters that have stepped."""
    return [optimizer for optimizer, known in session.view._known.items() if known.trains]


def exchange_and_step(session: Session, optimizer: torch.optim.Optimizer, *models: torch.nn.Module) -> None:
    """Step behind an exchange. models: get gradients before."""
    for each in models:
        give_gradients(each)
    session.view.note_exchange()
    optimizer.step()


def test_a_momentum_that_would_act_twice_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"the momentum 0\.9 of topk:momentum=0.9 and the optimizer's own would act twice"):
        check_momentum(make("topk:momentum=0.9"), SGD(model.parameters(), lr=1, momentum=0.9))
    check_momentum(make("topk:momentum=0.9"), SGD(model.parameters(), lr=1))
    check_momentum(make("topk"), SGD(model.parameters(), lr=1, momentum=0.9))


def test_the_optimizer_is_found_at_its_first_step_and_may_go(model: Any) -> None:
    other = network()
    session = viewed(model)
    SGD(other.parameters(), lr=1).step()
    assert not found(session)
    own = SGD(model.parameters(), lr=1)
    own.step()
    own.step()
    assert found(session) == [own]
    left = weakref.ref(own)
    del own
    gc.collect()
    assert left() is None and not found(session)


def test_an_optimizer_that_is_refused_is_refused_at_every_step_and_changes_no_weight(model: Any) -> None:
    give_gradients(model)
    before = model[0].weight.detach().clone()
    session = viewed(model, spec="topk:momentum=0.5")
    optimizer = SGD(model.parameters(), lr=1, momentum=0.9)
    for _ in range(2):
        with pytest.raises(ValueError, match="would act twice"):
            optimizer.step()
    assert torch.equal(model[0].weight, before) and not found(session)


def test_an_optimizer_that_steps_replaces_the_given_one_if_it_trains_as_much(model: Any) -> None:
    """hvd.DistributedOptimizer makes another object, with the same groups until a state is loaded."""
    given, part, whole = (SGD(each.parameters(), lr=rate) for each, rate in ((model, 1.0), (model[0], 2.0), (model, 3.0)))
    session = viewed(model, given)
    view = session.view
    part.step()
    assert view.optimizer is given and rates(view, "0.weight") == (1.0,)
    exchange_and_step(session, whole)
    assert view.optimizer is whole and found(session) == [part, whole] and rates(view, "0.weight") == (3.0,)


def test_sessions_come_and_go_while_optimizers_step(model: Any) -> None:
    """If a hook were removed while torch goes through its hooks, the step would break."""
    ended: list[Any] = [viewed(network()) for _ in range(3)]
    handle = register_optimizer_step_pre_hook(lambda *_: ended.clear())
    hooks = len(_global_optimizer_pre_hooks)
    session = viewed(model)
    optimizer = SGD(model.parameters(), lr=1)
    optimizer.step()
    handle.remove()
    gc.collect()
    assert found(session) == [optimizer]
    assert len(_global_optimizer_pre_hooks) == hooks - 1


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"optimizer= has none of the model's parameters; pass the optimizer that trains them\. If"
    ):
        viewed(network(), SGD(network().parameters(), lr=1))


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_a_parameter_that_comes_later_is_found_once_it_has_a_gradient(model: Any, how: str, given: bool) -> None:
    added = torch.nn.Linear(3, 1)
    model[0].weight.requires_grad_(how == "added")
    optimizer = SGD(model.parameters(), lr=1)
    session = viewed(model, optimizer if given else None)
    exchange_and_step(session, optimizer, model)
    if how == "added":
        optimizer.add_param_group({"params": added.parameters()})
    model[0].weight.requires_grad_(True)
    exchange_and_step(session, optimizer)
    before = model[1].weight.detach().clone()
    named = r"'0.weight' of shape \(2, 2\)" if how == "unfrozen" else r"a parameter of shape \(1, 3\)"
    with pytest.raises(RuntimeError, match=f"^{named} was unfrozen or added .* the replicas drift apart"):
        exchange_and_step(session, optimizer, model, added)
    assert torch.equal(model[1].weight, before)


def test_a_session_that_was_replaced_leaves_the_steps_of_the_next_one_alone(model: Any) -> None:
    model[0].weight.requires_grad_(False)
    first = SGD(model.parameters(), lr=1)
    old = viewed(model, first)
    exchange_and_step(old, first, model)
    model[0].weight.requires_grad_(True)
    second = SGD(model.parameters(), lr=1)
    new = viewed(model)
    exchange_and_step(new, second, model)
    assert old.view.optimizer is first and found(new) == [second]


def test_every_optimizer_of_the_parameters_is_checked_before_it_changes_any(model: Any) -> None:
    session = viewed(model)
    parts = [SGD(part.parameters(), lr=1) for part in model]
    for optimizer in (*parts, *parts):
        optimizer.step()
    assert found(session) == parts


def test_parameters_that_were_exchanged_from_the_start_may_come_to_an_optimizer_later(model: Any) -> None:
    head = SGD(model[1].parameters(), lr=1)
    session = viewed(model, head)
    exchange_and_step(session, head, model)
    head.add_param_group({"params": model[0].parameters()})
    exchange_and_step(session, head)
    whole = SGD(model.parameters(), lr=1)
    exchange_and_step(session, whole)
    assert session.view.optimizer is whole and found(session) == [head, whole]


@pytest.mark.parametrize("joins", [True, False])
def test_an_optimizer_may_train_another_model_too(model: Any, joins: bool) -> None:
    """One that has a session of its own may join it later."""
    other = network()
    optimizer = SGD([*model.parameters(), *([] if joins else other.parameters())], lr=1)
    session = viewed(model, optimizer)
    others = viewed(other) if joins else None
    exchange_and_step(session, optimizer, model, *([] if joins else [other]))
    if others is not None:
        optimizer.add_param_group({"params": other.parameters()})
        exchange_and_step(session, optimizer, other)
        assert others.view.exchanged
    assert session.view.optimizer is optimizer


def rates(view: OptimizerView, *names: str) -> tuple[float, ...]:
    every = view.rates()
    assert every is not None
    return tuple(every[name] for name in names)


def test_rates_are_those_of_the_moment(model: Any) -> None:
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
    optimizer, names = SGD(groups, lr=0.1), ("0.weight", "1.bias")
    view = OptimizerView(Parameters(model.named_parameters()), optimizer)
    assert rates(view, *names) == (0.5, 0.1)
    optimizer.param_groups[0]["lr"] = 0.25
    assert rates(view, *names) == (0.25, 0.1)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.125
    optimizer.load_state_dict(state)  # replaces the groups
    optimizer.param_groups[1]["lr"] = 0.0625
    assert rates(view, *names) == (0.125, 0.0625)
    optimizer.param_groups[1]["lr"] = torch.tensor(0.5)
    assert rates(view, *names) == (0.125, 0.5)
    few = SGD(model[0].parameters(), lr=0.1)
    view = OptimizerView(Parameters(model.named_parameters()), few)
    assert rates(view, *names) == (0.1, UNKNOWN)
    few.add_param_group({"params": model[1].parameters(), "lr": 0.5})
    assert rates(view, *names) == (0.1, 0.5)


def test_the_checks_of_a_session_end_once_another_one_exchanges_its_parameters(model: Any) -> None:
    """An attach() that is refused after its session was made must not silence the session before."""
    give_gradients(model)
    first = viewed(model)
    second = Session(first.compressor, first.slots, first.network, Options(), Door())
    optimizer, other = SGD(model.parameters(), lr=1), SGD(model.parameters(), lr=1)
    exchange_and_step(first, optimizer)
    assert found(first) == [optimizer]
    exchange_and_step(second, other)
    assert found(first) == [optimizer] and found(second) == [other]


LEFT = "without moments that the exchange takes over"


@pytest.mark.parametrize(
    ("make_optimizer", "tolerates", "named"),
    [
        (lambda params: SGD(params, 0.1, momentum=0.9), True, "moments of SGD"),
        (lambda params: SGD(params, 0.1), True, "without momentum"),
        (lambda params: torch.optim.AdamW(params), True, "moments of Adam"),
        (lambda params: SGD(params, 0.1, momentum=0.9, dampening=0.1), False, LEFT),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), False, LEFT),
        (lambda params: torch.optim.RMSprop(params), False, LEFT),
        (lambda params: SGD([*params, torch.nn.Parameter(torch.ones(1))], 0.1), False, LEFT),
        (lambda params: None, False, "unknown before its first step"),
    ],
)
def test_where_entries_may_wait(make_optimizer: Any, tolerates: bool, named: str) -> None:
    """auto offers candidates with a residual only there, and ranks that differ are told so."""
    parameter = torch.nn.Parameter(torch.ones(3))
    view = OptimizerView(Parameters([("w", parameter)]), make_optimizer([parameter]))
    assert view.tolerates_delay == tolerates and view.terms == {"optimizer": named}
