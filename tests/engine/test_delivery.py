"""Verdicts on steps: a step that was discarded in its middle says nothing about the next one."""

from __future__ import annotations

import torch

from gradcomp.core.compressor import Layer
from gradcomp.engine.steps.reducer import Reducer
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make


def test_a_verdict_of_a_discarded_step_does_not_count_for_the_next_one() -> None:
    """Its bucket had delivered an update that was not finite. Adding the next step's updates back would count them twice."""
    layers = {name: Layer(100, torch.device("cpu")) for name in ("a", "b")}
    reducer = Reducer(make("topk:ratio=1,wire=exact"), layers, MemoryNetwork(Board(1), 0, 1), 1e-6, 0)
    assert len(reducer.buckets) == 2
    reducer.mark_ready("a", torch.full((100,), float("inf")))
    reducer.advance()
    reducer.abort()
    for bucket in reducer.buckets:
        bucket.residual.zero_()
    for name in layers:
        reducer.mark_ready(name, torch.ones(100))
    reducer.finish_step()
    assert not any(bucket.residual.any() for bucket in reducer.buckets)
