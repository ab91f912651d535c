"""The session of one model: the phases in which events are refused, and what follows a failure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradcomp.engine.optimizer_view import OptimizerView
from gradcomp.engine.phases import REFUSED, Door, Phase
from gradcomp.engine.reducer import Options, Reducer
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters, Slot, Slots
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make


def made(spec: str = "topk:ratio=0.1", optimizer: Any = None, **door: Any) -> tuple[Session, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.zeros(100))
    given = None if optimizer is None else optimizer([parameter], 0.1, 0.9)
    options = Options(given)
    return Session(make(spec), Parameters([("p", parameter)]), MemoryNetwork(Board(1), 0, 1), options, Door(**door)), parameter


def in_phase(phase: Phase) -> Session:
    """A session that has come to a phase."""
    session, parameter = made(optimizer=torch.optim.SGD)
    parameter.grad = torch.randn(100)
    if phase is not Phase.UNMET:
        session.meet()
    if phase in (Phase.BACKWARD, Phase.DELIVERED):
        session.ready(session.slot(parameter))
    if phase is Phase.DELIVERED:
        session.finish()
    if phase is Phase.FAILED:
        session.failed(ValueError("the network is gone"))
    assert session.phase is phase
    return session


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", REFUSED)
def test_an_event_is_refused_in_the_phases_of_its_row(event: str, phase: Phase) -> None:
    session = in_phase(phase)
    if phase in REFUSED[event]:
        with pytest.raises(RuntimeError) as error:
            session.refuse(event)
        assert ("the network is gone" in str(error.value)) == (phase is Phase.FAILED)
    else:
        session.refuse(event)


def test_an_optimizer_that_steps_before_backward_has_ended_is_refused_and_fails_the_step() -> None:
    parameter = torch.nn.Parameter(torch.zeros(100))
    optimizer, network = torch.optim.SGD([parameter], 0.1), MemoryNetwork(Board(1), 0, 1)
    session = Session(make("dense"), Parameters([("p", parameter)]), network, Options(optimizer), Door(ends_in_backward=True))
    parameter.grad = torch.randn(100)
    session.ready(session.slot(parameter))
    with pytest.raises(RuntimeError, match=r"^backward\(\) ended before all gradients were exchanged.*find_unused"):
        optimizer.step()
    assert session.phase is Phase.FAILED


@pytest.mark.parametrize("remedy", ["", "; or load a state from before"])
def test_after_a_failure_a_door_adds_its_remedy(remedy: str) -> None:
    session, parameter = made(after_failure=remedy)
    session.failed(ValueError("the network is gone"))
    parameter.grad = torch.randn(100)
    for call in (session.finish, lambda: session.ready(session.slot(parameter))):
        with pytest.raises(RuntimeError, match="refuses further steps") as error:
            call()  # type: ignore[operator]
        assert str(error.value).endswith(f"from their last states{remedy}")
    session.load_state_dict(made()[0].state_dict())
    session.ready(session.slot(parameter))
    session.finish()


def test_a_change_in_the_middle_of_a_step_is_refused_and_one_between_carries_the_residual_over() -> None:
    """Gradients that were handed over would be forgotten, and the ranks' weights drift apart."""
    session, parameter = made()
    for _ in range(2):
        parameter.grad = torch.randn(100)
        session.ready(session.slot(parameter))
        with pytest.raises(RuntimeError, match=r"change\(\) came in the middle of a step"):
            session.refuse("change()")
        session.finish()
    residual = session.residual()["p"].clone()
    session.replace(make("dense"))
    assert torch.equal(session.residual()["p"], residual) and residual.any()


def test_a_load_that_is_refused_leaves_the_update_waiting() -> None:
    """The spec of the state leaves the momentum to the optimizer, which would add its own to the one in the update."""
    session, parameter = in_phase(Phase.DELIVERED), torch.nn.Parameter(torch.zeros(3))
    other = Session(make("dense"), Parameters([("p", parameter)]), MemoryNetwork(Board(1), 0, 1), Options(), Door())
    with pytest.raises(ValueError, match="does not fit the model"):
        session.load_state_dict(other.state_dict(), make)
    assert session.phase is Phase.DELIVERED and session.view.taken


def test_a_change_that_fails_leaves_the_momentum_with_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    session = in_phase(Phase.DELIVERED)
    session.view.acting.step()  # type: ignore[union-attr]
    monkeypatch.setattr(session._membership, "settle", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.replace(make("topk:ratio=0.1,momentum=0"))
    assert session.view.taken
    session.recover()
    monkeypatch.undo()
    session.replace(make("topk:ratio=0.1,momentum=0"))
    assert not session.view.taken


def test_a_verdict_of_a_discarded_step_does_not_count_for_the_next_one() -> None:
    """Its bucket had delivered an update that was not finite. Adding the next step's updates back would count them twice."""
    slots = {name: Slot(name, (100,), torch.device("cpu")) for name in ("a", "b")}
    options, view = Options(bucket_mb=1e-6), OptimizerView(Slots([*slots.values()]))
    reducer = Reducer(make("topk:ratio=1,wire=exact"), slots, MemoryNetwork(Board(1), 0, 1), options, view)
    assert len(reducer.buckets) == 2
    reducer.ready(slots["a"], torch.full((100,), float("inf")))
    reducer.advance()
    reducer.abort()
    for bucket in reducer.buckets:
        bucket.residual.zero_()
    for slot in slots.values():
        reducer.ready(slot, torch.ones(100))
    reducer.finish()
    assert not any(bucket.residual.any() for bucket in reducer.buckets)
