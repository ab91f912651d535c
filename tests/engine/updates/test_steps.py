"""Hooks around the steps of any optimizer: the first act before them and after them, also within closures."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.engine.phases import Door
from gradcomp.engine.updates.steps import ignore, listen


class Noted:
    """A session, and its exchange of updates. takes_part: in all steps."""

    reducer, door, exchanged, turns = SimpleNamespace(on_updates=False), Door(), frozenset[int](), None
    updates = property(lambda self: self)

    def __init__(self, into: list[Any], takes_part: bool = False):
        self._into, self.takes_part = into, takes_part

    def before(self, optimizer: torch.optim.Optimizer, has_closure: bool = False) -> Noted | None:
        self._into.append("before")
        return self if self.takes_part else None

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        self._into.append("after")

    def show(self, optimizer: torch.optim.Optimizer) -> None:
        self._into.append("show")

    def show_in(self, optimizer: torch.optim.Optimizer, saved: Any, fills: bool) -> None:
        self._into.append("show in a copy")

    def hide(self) -> None:
        self._into.append("hide")

    def give_up(self, optimizer: torch.optim.Optimizer) -> None:
        self._into.append("give up")


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])


def test_every_step_of_any_optimizer_is_seen_as_long_as_a_listener_lives() -> None:
    seen = list[Any]()
    listeners = [Noted(seen) for _ in range(3)]
    for each in listeners:
        listen(each)
    sgd().step()
    assert seen == ["before"] * 3 + ["after"] * 3
    seen.clear()
    ignore(listeners[0])
    ignore(listeners[0])
    sgd().step()
    assert seen == ["before"] * 2 + ["after"] * 2
    seen.clear()
    del each, listeners
    sgd().step()
    assert not seen


def test_a_closure_runs_within_the_step_with_gradients_enabled() -> None:
    optimizer, seen = sgd(), list[Any]()
    listen(listener := Noted(seen))

    def closure() -> float:
        seen.append(torch.is_grad_enabled())
        return 0.5

    for takes_part in (False, True):
        listener.takes_part = takes_part
        for step in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
            seen.clear()
            with torch.no_grad():
                assert step() == 0.5
            assert seen == (["before", "hide", "show", True, "hide", "after"] if takes_part else ["before", True, "after"])
    del listener


class Scaled(torch.optim.SGD):
    def step(self, factor: float = 1.0, *, closure: Any = None) -> Any:  # type: ignore[override]
        return factor if closure is None else closure()


def test_arguments_of_an_optimizers_own_arrive_as_they_are() -> None:
    optimizer, seen = Scaled([torch.nn.Parameter(torch.zeros(3))]), list[Any]()
    listen(listener := Noted(seen, takes_part=True))
    assert optimizer.step(3.0) == 3.0 and optimizer.step(closure=lambda: 0.5) == 0.5 and optimizer.step() == 1.0
    del listener


def test_hooks_of_the_user_act_on_the_weights_of_all_ranks() -> None:
    """Before the exchange begins, and after it has ended; also those that come later."""
    optimizer, seen = sgd(), list[Any]()
    listen(listener := Noted(seen))
    for name in ("first", "second"):
        optimizer.register_step_pre_hook(lambda *_, name=name: seen.append(f"pre {name}"))  # type: ignore[misc]
        optimizer.register_step_post_hook(lambda *_, name=name: seen.append(f"post {name}"))  # type: ignore[misc]
        optimizer.step()
        seen.clear()
        optimizer.step()
    assert seen == ["pre first", "pre second", "before", "after", "post first", "post second"]
    del listener


def test_a_closure_that_fails_has_seen_all_settings_and_its_step_is_given_up() -> None:
    optimizer, seen = sgd(), list[Any]()
    listen(listener := Noted(seen, takes_part=True))

    def closure() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert seen == ["before", "hide", "show"]
    optimizer.state_dict()
    assert seen == ["before", "hide", "show", "give up", "show in a copy"]
    del listener


def test_a_step_that_fails_is_given_up_before_the_next_one() -> None:
    """Steps that one calls are no failed ones."""
    seen, inner = list[Any](), sgd()

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise MemoryError

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            inner.step()
            return inner.step()

    broken, outer = (kind([torch.nn.Parameter(torch.zeros(3))]) for kind in (Broken, Outer))
    listen(listener := Noted(seen, takes_part=True))
    outer.step()
    assert seen == ["before", "hide", *["before", "hide", "after"] * 2, "after"]
    seen.clear()
    with pytest.raises(MemoryError):
        broken.step()
    inner.step()
    assert seen == ["before", "hide", "give up", "before", "hide", "after"]
    del listener


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("kind, moment", [(optim.SGD, ""), (optim.Adam, "exp_avg")])
def test_a_thread_that_saves_the_optimizer_in_the_middle_of_a_step_changes_nothing(kind: Any, moment: str) -> None:
    """The state that it gets has the user's settings, and no moment that the residual stands for."""
    module, name, ends, saved = sys.modules[kind.__module__], kind.__name__.lower(), [], list[Any]()
    update = getattr(module, name)
    for saves in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 3))
        handle = gradcomp.ddp.attach(model, "topk:ratio=0.3")
        optimizer = kind(model.parameters(), 0.1, **({} if moment else {"momentum": 0.9}))
        wanted = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}

        def saving(*tensors: Any, optimizer: Any = optimizer, **options: Any) -> None:
            saved.append(optimizer.state_dict())
            update(*tensors, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, saving if saves else update)
            for _ in range(3):
                model(torch.ones(5, 4)).square().mean().backward()
                optimizer.step()
        ends.append(model.module.weight.detach().clone())
        assert handle.stats()["steps"] == 3
    assert torch.equal(*ends) and len(saved) == 3
    for each in saved:
        assert each["param_groups"][0].items() >= wanted.items()
        assert not any(state[moment].any() for state in each["state"].values() if moment)


@pytest.mark.usefixtures("group_of_one")
def test_a_thread_gets_no_state_of_the_middle_of_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DistributedDataParallel(nn.Linear(4, 3))
    handle = gradcomp.ddp.attach(model, "topk:ratio=0.3")
    optimizer = optim.SGD(model.parameters(), 0.1)
    (bucket,) = handle._session.reducer.buckets
    assert bucket.progress is not None
    deliver, said = bucket.progress.deliver, []

    def delivering(*update: Any) -> None:
        with pytest.raises(RuntimeError, match=r"state_dict\(\) came in the middle of a step") as error:
            handle.state_dict()
        said.append(error)
        deliver(*update)

    monkeypatch.setattr(bucket.progress, "deliver", delivering)
    model(torch.ones(5, 4)).square().mean().backward()
    handle.state_dict()
    optimizer.step()
    assert said and handle.state_dict()
