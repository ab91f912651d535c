"""The session of one model: the phases in which events are refused, and what follows a failure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradcomp.engine.phases import TRANSITIONS, Door, Phase
from gradcomp.engine.reducer import Options, Reducer
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters, Slot
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make


def made(spec: str = "topk:ratio=0.1", **door: Any) -> tuple[Session, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.zeros(100))
    return Session(
        make(spec), Parameters([("p", parameter)]), MemoryNetwork(Board(1), 0, 1), Options(), Door(**door)
    ), parameter


def in_phase(phase: Phase) -> Session:
    """A session that has come to a phase."""
    session, parameter = made()
    parameter.grad = torch.randn(100)
    if phase is not Phase.UNMET:
        session.meet()
    if phase is Phase.EXCHANGING:
        session.gradients.ready(session.slot(parameter))
    if phase is Phase.FAILED:
        session.failed(ValueError("the network is gone"))
    assert session.phases.now is phase
    return session


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", TRANSITIONS)
def test_an_event_leads_where_its_row_says(event: str, phase: Phase) -> None:
    """To another phase, or to an error, after which the phase is the same. Only a meeting leads from UNMET to IDLE."""
    session = in_phase(phase)
    follows = TRANSITIONS[event].get(phase, phase)
    if isinstance(follows, str):
        with pytest.raises(RuntimeError) as error:
            session.phases.note(event)
        assert ("the network is gone" in str(error.value)) == (phase is Phase.FAILED)
        assert session.phases.now is phase
    else:
        session.phases.note(event)
        assert session.phases.now is (Phase.IDLE if follows is Phase.UNMET and session.has_met else follows)


@pytest.mark.parametrize("remedy", ["", "; or load a state from before"])
def test_after_a_failure_a_door_adds_its_remedy(remedy: str) -> None:
    session, parameter = made(after_failure=remedy)
    session.failed(ValueError("the network is gone"))
    parameter.grad = torch.randn(100)
    for call in (session.gradients.finish, lambda: session.gradients.ready(session.slot(parameter))):
        with pytest.raises(RuntimeError, match="refuses further steps") as error:
            call()  # type: ignore[operator]
        assert str(error.value).endswith(f"from their last states{remedy}")
    other, _ = made()
    session.resume.load_state_dict(other.resume.state_dict())
    session.gradients.ready(session.slot(parameter))
    session.gradients.finish()


def test_a_change_in_the_middle_of_a_step_is_refused_and_one_between_carries_the_residual_over() -> None:
    """Gradients that were handed over would be forgotten, and the ranks' weights drift apart."""
    session, parameter = made()
    for _ in range(2):
        parameter.grad = torch.randn(100)
        session.gradients.ready(session.slot(parameter))
        with pytest.raises(RuntimeError, match=r"change\(\) came in the middle of a step"):
            session.phases.note("change()")
        session.gradients.finish()
    residual = session.resume.residual()["p"].clone()
    session.resume.change(make("dense"))
    assert torch.equal(session.resume.residual()["p"], residual) and residual.any()


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("spec", ["topk:ratio=1,wire=exact", "blocks:feedback=true"])
def test_a_step_that_failed_in_one_bucket_returns_the_updates_of_the_others(spec: str, scale: float) -> None:
    """Whoever sees an update that is not finite takes none of them. The bucket itself has kept its finite entries already."""
    slots = {name: Slot(name, (100,), torch.device("cpu")) for name in ("a", "b")}
    reducer = Reducer(make(spec), slots, MemoryNetwork(Board(1), 0, 1), Options(bucket_mb=1e-6))
    grads = {name: torch.ones(100) for name in slots}
    grads["a"][3] = torch.inf
    reducer.ready_all([*slots.values()], [each.clone() for each in grads.values()])
    reducer.finish(scale)
    residuals = [bucket.copied_residual() for bucket in reducer.buckets]
    assert len(residuals) == 2
    for name, found in {name: each for own in residuals for name, each in own.items()}.items():
        assert torch.allclose(found, grads[name].nan_to_num(posinf=0.0), atol=1e-6), name
