"""Verdicts on steps: a step that was discarded in its middle says nothing about the next one."""

from __future__ import annotations

import torch

from gradcomp.engine.optimizer_view import OptimizerView
from gradcomp.engine.reducer import Options, Reducer
from gradcomp.engine.slots import Slot, Slots
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make


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
