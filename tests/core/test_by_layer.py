"""Rules by layer: a compressor of its own for the layers whose names match a pattern."""

from __future__ import annotations

import pytest
import torch
from training import draw

import gradcomp
from gradcomp.compressors.dense import Dense
from gradcomp.compressors.topk import TopK
from gradcomp.core.by_layer import ByLayer
from gradcomp.engine.feedback import Feedback

SHAPES = {"a.weight": (60, 50), "a.bias": (60,), "b.weight": (40, 60)}


def test_rules_by_layer() -> None:
    made = gradcomp.make("sdagc:lam=3; *.bias=dense; b.*=topk:ratio=0.5")
    assert isinstance(made, ByLayer)
    assert made.rules == (("*.bias", Dense()), ("b.*", Feedback(TopK(ratio=0.5))))
    assert made == gradcomp.by_layer({"*.bias": "dense", "b.*": "topk:ratio=0.5"}, "sdagc:lam=3")
    simulation, other = (gradcomp.Simulation(made, SHAPES, 2) for _ in range(2))
    grads = draw(0, SHAPES, 2)
    update = simulation.step(grads)
    assert torch.equal(update["a.bias"], (grads[0]["a.bias"] + grads[1]["a.bias"]) * 0.5)
    assert 0 < update["a.weight"].count_nonzero() < 100
    assert update["b.weight"].count_nonzero() > 1200
    assert simulation.stats()["buckets"] == 3
    other.load_state_dict(simulation.state_dict())
    ours, theirs = simulation.step(draw(1, SHAPES, 2)), other.step(draw(1, SHAPES, 2))
    assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


def test_a_pattern_that_fits_no_layer_is_warned_of() -> None:
    """It may be a wrong one, or that of a layer that is frozen."""
    with pytest.warns(UserWarning, match=r"no layer that is trained has a name like 'bais\*'; they are weight, bias$"):
        gradcomp.Simulation("topk; bais*=dense", {"weight": (3, 3), "bias": (3,)}, 1)
