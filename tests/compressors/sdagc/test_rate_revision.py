"""Learning-rate revision: the residual follows a rate that changes."""

from __future__ import annotations

import torch
from torch import Tensor

import gradcomp
from gradcomp.engine.collector import StepFacts
from gradcomp.engine.feedback import Feedback
from gradcomp.native.memory import Memory
from gradcomp.protocol import Layout


def revised(spec: str, rates: list[float]) -> list[Tensor]:
    """Return a layer's residual after each step. Its gradients are 1, 0, 0 ..., and no entry exceeds the threshold."""
    source = gradcomp.make(spec)
    assert isinstance(source, Feedback)
    layout = Layout(("w",), (4000,), torch.device("cpu"))
    state = source.init(layout, 0)
    left = []
    for step, rate in enumerate(rates):
        grad = torch.full((4000,), 1.0 if step == 0 else 0.0)
        grad[0] = 1e-3 * (step + 1)
        acc = source.collect([grad], state, StepFacts(Memory(), 1, (rate,)))
        left.append(acc.residual.clone())
    return left


def test_the_residual_may_follow_the_learning_rate() -> None:
    """keep: the residual acts with the rate it was found under; rescale: it shrinks with the rate once more."""
    assert [float(x[9]) for x in revised("sdagc:small=none,lr_revision=none", [0.4, 0.1])] == [1, 1]
    assert [float(x[9]) for x in revised("sdagc:small=none,lr_revision=keep", [0.4, 0.1, 0.1])] == [1, 4, 4]
    assert [float(x[9]) for x in revised("sdagc:small=none,lr_revision=rescale", [0.4, 0.1, 0.2])] == [1, 0.25, 0.5]
