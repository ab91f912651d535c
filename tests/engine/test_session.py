"""The session of one model: a change of spec that comes at the wrong time."""

from __future__ import annotations

import pytest
import torch

from gradcomp.engine.parameters import Parameters
from gradcomp.engine.sessions.session import Session
from gradcomp.engine.steps.options import Options
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make


class Alone(MemoryNetwork):
    """A connection of one rank."""

    def __init__(self) -> None:
        super().__init__(Board(1), 0, 1)
        self.hosts, self.device, self.generation, self.host = None, torch.device("cpu"), object(), "here"
        self.meeting, self.ready = "", True

    def prepare(self) -> None:
        """Nothing is to be prepared."""


def test_a_change_in_the_middle_of_a_step_is_refused() -> None:
    """Gradients that were handed over would be forgotten, and the ranks' weights drift apart."""
    p = torch.nn.Parameter(torch.zeros(100))
    session = Session(make("topk:ratio=0.1"), Parameters([("p", p)]), Alone(), Options(None, None, 25, 0), "unknown", "")
    for _ in range(2):
        p.grad = torch.randn(100)
        session.mark_ready(session.slot(p))
        with pytest.raises(RuntimeError, match=r"change\(\) came in the middle of a step"):
            session.change(make("dense"))
        session.finish_step()
    waiting = session.residual()["p"].clone()
    session.change(make("dense"))
    assert torch.equal(session.residual()["p"], waiting) and waiting.any()
