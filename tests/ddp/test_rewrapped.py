"""A model that DDP wraps anew in mid-training, and gradients that a hook changes: with the remedy, training is torch's own."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from one_rank import SPEC, Run, adamw, both, plain, same
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.usefixtures("group_of_one")

LOST = "goes on without the moments that it had.*new DDP around the same layers"


def wrap(run: Run, spec: str | None = SPEC, given: bool = True) -> None:
    """Wrap the model. An earlier session may have ended by then."""
    run.whole = run.handle = None
    gc.collect()
    run.whole = DistributedDataParallel(run.model)
    if spec is not None:
        run.handle = gradcomp.ddp.attach(run.whole, spec, optimizer=run.optimizer if given else None)


@both
@pytest.mark.parametrize("given", [True, False])
def test_a_new_ddp_that_loses_the_moments_warns_once(optimizer_of: Any, given: bool) -> None:
    run = Run(optimizer_of).on(range(4))
    wrap(run, given=given)
    with pytest.warns(UserWarning, match=LOST) as seen:
        run.on(range(4, 8))
    assert len(seen) == 1 and seen[0].filename.endswith("one_rank.py")


@both
@pytest.mark.parametrize("remedy", ["state_dict", "change", "change for new layers", "new optimizer"])
def test_a_new_ddp_goes_on_with_the_moments(optimizer_of: Any, remedy: str) -> None:
    def training(spec: str | None) -> Run:
        run = Run(optimizer_of, None)
        run.model[0].requires_grad_("new layers" not in remedy)
        wrap(run, spec)
        run.on(range(4))
        saved = run.handle.state_dict() if spec and remedy == "state_dict" else None
        run.model.requires_grad_(True)
        if spec and "change" in remedy:
            run.handle.change(f"{spec},momentum=0")
        if remedy == "new optimizer":
            run.optimizer = optimizer_of(run.model.parameters())
        wrap(run, spec)
        if saved:
            run.handle.load_state_dict(saved)
        return run.on(range(4, 8))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(training)


@both
def test_a_hook_changes_gradients_before_their_exchange(optimizer_of: Any) -> None:
    masks: list[torch.Tensor] = []

    def masked(run: Run, step: int) -> None:
        run.optimizer.zero_grad()
        run.loss(step).backward()
        for each, mask in zip(run.model.parameters(), masks, strict=True):
            each.grad *= mask  # type: ignore[operator]
        run.optimizer.step()

    def training(spec: str | None) -> Run:
        run = Run(optimizer_of, spec)
        masks[:] = [0.3 * (torch.rand_like(each) < 0.5) for each in run.model.parameters()]
        for each, mask in zip(run.model.parameters(), masks, strict=True) if spec else []:
            each.register_hook(lambda grad, mask=mask: grad * mask)
        return run.on(body=plain if spec else masked)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(training)
    remedy = r"parameter.register_hook\(lambda grad: grad \* mask\) once"
    if optimizer_of is adamw:
        with pytest.raises(RuntimeError, match=remedy):
            Run(optimizer_of).on(body=masked)
    else:
        with pytest.warns(UserWarning, match=remedy) as seen:
            Run(optimizer_of).on(body=masked)
        assert [each.filename for each in seen] == [__file__]
