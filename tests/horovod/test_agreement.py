"""Ranks compare their terms before the first exchange, and again after a new start: a difference raises on all of them."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from doors import DOORS, Training
from torch import nn

import gradcomp
from gradcomp import _version

pytestmark = pytest.mark.slow

SPEC = "topk:ratio=0.05"
DISAGREE = "the ranks do not agree and cannot exchange gradients; make these equal on all ranks: "
TERMS = {
    "spec": "spec: rank 0 has 'topk:ratio=0.05', rank 1 has 'topk:ratio=0.06'",
    "version": "gradcomp's version: rank 0 has '0.1.0', rank 1 has '9.9'",
    "seed": "seed: rank 0 has '7', rank 1 has '8'",
    "bucket_mb": "bucket_mb: rank 0 has '2', rank 1 has '3'",
    "names": "parameter names: ",
    "shapes": "parameter shapes: ",
    "layout": "parameter shapes: ",
    "count": "parameter names: rank 0 has '4: ",
    "state": "a state of 3 ranks was loaded on rank 1, but no rank loaded that of ranks 0, 2",
}


def differing(term: str, door: str) -> None:
    """Train on ranks of which rank 1 differs in one term."""
    odd = hvd.rank() == 1
    torch.manual_seed(1)
    width = 5 if term == "shapes" and odd else 3
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    if term == "layout" and odd:
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    spec = "topk:ratio=0.06" if term == "spec" and odd else "lgc" if term == "state" else SPEC
    options: dict[str, Any] = {"bucket_mb": 3 if term == "bucket_mb" and odd else 2, "seed": 8 if term == "seed" and odd else 7}
    if term == "count" and odd:
        model[1].bias.requires_grad_(False)
    true, _version.VERSION = _version.VERSION, "9.9" if term == "version" and odd else _version.VERSION
    try:
        run = Training(door, model, spec, prefix=f"{term}/{door}{'x' if term == 'names' and odd else ''}.", **options)
        if term == "state" and odd:
            run.handle.load_state_dict(run.handle.state_dict())
        model(torch.ones(2, 4)).sum().backward()
        run.optimizer.step()
    finally:
        _version.VERSION = true


def program() -> dict[Any, Any]:
    """Train with one difference after another, then across two new starts of Horovod."""
    hvd.init()
    odd = hvd.rank() == 1
    found: dict[Any, Any] = {}
    for term in TERMS:
        for door in DOORS:
            found[term, door] = small_net.refused(lambda t=term, r=door: differing(t, r))  # type: ignore[misc]
            hvd.barrier()

    runs = {(name, door): Training(door, spec=SPEC, bucket_mb=0.015) for door in DOORS for name in ("broken", "whole")}
    for (name, _), run in runs.items():
        run.train(10 if name == "broken" else 20)
    hvd.barrier()
    ranks.start_anew()
    for (name, door), run in runs.items():
        found["weights", name, door] = run.train(10 if name == "broken" else 0)
    hvd.barrier()
    ranks.start_anew()
    for (name, door), run in runs.items():
        if odd:
            run.handle._session.compressor = gradcomp.make("topk:ratio=0.5")
        found["again", name, door] = small_net.refused(lambda r=run: r.train(1))  # type: ignore[misc]
        hvd.barrier()
    return found


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch(program, 3, anew=2)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("term", TERMS)
def test_all_ranks_raise_naming_the_term(term: str, door: str) -> None:
    for rank in found():
        text = rank[term, door]
        assert text.startswith(f"ValueError: {'a state of' if term == 'state' else DISAGREE}"), text
        assert TERMS[term] in text
    assert len({rank[term, door] for rank in found()}) == 1, "all ranks hold the same records, so all say the same"


@pytest.mark.parametrize("door", DOORS)
def test_training_continues_with_the_residual_after_a_new_start(door: str) -> None:
    """hvd.shutdown() and hvd.init() on all ranks, as in an elastic reset: the same weights as without, to the last bit."""
    for rank in found():
        assert torch.equal(rank["weights", "broken", door], rank["weights", "whole", door])
        assert torch.equal(rank["weights", "broken", door], found()[0]["weights", "broken", door])


@pytest.mark.parametrize("door", DOORS)
def test_after_a_new_start_the_ranks_compare_again(door: str) -> None:
    for rank in found():
        for name in ("broken", "whole"):
            said = "spec: rank 0 has 'topk:ratio=0.05', rank 1 has 'topk:ratio=0.5'"
            assert rank["again", name, door] == f"ValueError: {DISAGREE}{said}"
