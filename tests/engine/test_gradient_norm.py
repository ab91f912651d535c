"""stats()["grad_norm"] is the norm of this rank's own gradients in the last backward pass, whatever happens to them then."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from replicas import Replicas
from torch.optim import SGD, AdamW
from training import draw

SPECS = ["topk", "sign", "orq", "topk:momentum=0"]


def norm_of(grads: Any) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in grads.values()))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer_of", [partial(SGD, lr=0.1, momentum=0.9), AdamW])
def test_it_is_the_norm_of_the_ranks_own_gradients(optimizer_of: Any, form: torch.dtype, spec: str) -> None:
    ours = Replicas(spec, optimizer_of, ranks=2, form=form, bucket_mb=1e-4)
    assert ours.ranks[0].session.updates.gradients.norm is None
    for step in range(3):
        grads = [{name: grad.to(form) for name, grad in own.items()} for own in draw(step, ranks=2)]
        ours.exchange(grads)
        for later in (False, True):
            if later:
                for weight in ours.weights.values():
                    weight.grad *= 0.1  # type: ignore[operator]
                ours.step()
            for rank, own in zip(ours.ranks, grads, strict=True):
                assert rank.session.updates.gradients.norm == pytest.approx(norm_of(own), rel=1e-6)


def test_one_that_is_not_finite_is_this_ranks_alone() -> None:
    ours = Replicas("topk", AdamW, ranks=2)
    grads = draw(0, ranks=2)
    grads[1]["0.bias"][0] = math.inf
    ours.exchange(grads)
    first, second = (rank.session.updates.gradients.norm for rank in ours.ranks)
    assert first == pytest.approx(norm_of(grads[0]), rel=1e-6) and second == math.inf
