"""A DDP model that is copied or saved whole, after attach(): as without it."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from loops import LEFT, Run, sgd

import gradcomp

pytestmark = pytest.mark.usefixtures("group_of_one")

WITHOUT = r"was copied, or loaded from a file.*gradients whole.*gradcomp\.ddp\.attach"


def loaded(model: Any) -> Any:
    """Save a model whole, and load it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, loaded])
def test_a_copied_model_trains_as_ddps_own_until_it_is_attached(copied: Any) -> None:
    run = Run(sgd, "topk:ratio=0.1")
    run.on(range(2))
    twice, twin = copied(copied(run.whole)), Run(sgd, None)
    twin.model.load_state_dict(run.model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            run.loss(2, twice)
    for model in (twice, twin.whole):
        model.zero_grad()
    with pytest.warns(UserWarning, match=WITHOUT) as seen:
        for step in (2, 3):
            run.loss(step, twice).backward()
    assert len(seen) == 1 and seen[0].filename.endswith("loops.py")
    for step in (2, 3):
        twin.loss(step).backward()
    for own, wanted in zip(twice.parameters(), twin.whole.parameters(), strict=True):
        assert torch.equal(own.grad, wanted.grad)
    run.on(range(2, 4))  # the first model's exchange is as it was
    assert run.handle.stats()["steps"] == 4


def test_a_copied_model_is_attached_without_a_word() -> None:
    run = Run(sgd, LEFT).on(range(2))
    run.whole = copy.deepcopy(run.whole)
    run.model = run.whole.module
    run.optimizer = sgd(run.model.parameters())
    run.handle = gradcomp.ddp.attach(run.whole, LEFT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.on(range(2, 4))
    assert run.handle.stats()["steps"] == 2
