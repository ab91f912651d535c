"""Every kind of spec on real ranks: sdagc, lgc and their parts, rules by layer, and changing the spec in mid-training."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch

pytestmark = pytest.mark.slow

SPECS = [
    "sdagc:lam=2",
    "sdagc:density=0.02,small=pool,momentum=0.9,shared=true",
    "sdagc:lam=2,sam=0.9,flush=5,clip=1,warmup=5",
    "sdagc:lam=2,lr_revision=keep,wire=exact",
    "sdagc:lam=2,lr_revision=rescale,momentum=0.9,clip=1,clip_by=model",
    "sdagc:density=0.05,lr_revision=density",
    "sdagc:lam=2,lr_revision=staleness",
    "sdagc:lam=2,lr_revision=per_layer",
    "sdagc; *.bias=dense; *last.*=topk:ratio=0.1",
    "lgc:dense=2,learn=4,ratio=0.02,first=dense",
    "lgc:dense=2,learn=4,ratio=0.02,first=dense,instance=server,leader=rotate,momentum=0.9",
]
both_routes = pytest.mark.parametrize("route", ["A", "B"])


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch("horovod_specs", 2, {"specs": SPECS})  # two: whoever adds, a + b is b + a


@both_routes
@pytest.mark.parametrize("spec", SPECS)
def test_all_ranks_hold_the_same_weights(spec: str, route: str) -> None:
    first, other = (rank["trained", route, spec, False] for rank in found())
    assert first.isfinite().all()
    assert torch.equal(first, other)


@both_routes
@pytest.mark.parametrize("spec", SPECS)
def test_a_loaded_state_continues_to_the_last_bit(spec: str, route: str) -> None:
    for rank in found():
        assert torch.equal(rank["trained", route, spec, True], rank["trained", route, spec, False])


@both_routes
def test_the_spec_can_change_in_mid_training(route: str) -> None:
    all_ranks = [rank["changed", route] for rank in found()]
    for own in all_ranks:
        assert own["carried"] and own["something"] and own["steps"] == 20
        assert torch.equal(own["weights"], all_ranks[0]["weights"])


@both_routes
def test_a_spec_that_changes_otherwise_on_one_rank_is_refused_on_all(route: str) -> None:
    for rank in found():
        assert "spec: rank 0 has 'topk:ratio=0.02', rank 1 has 'sdagc:lam=2'" in rank["one", route]


def test_a_learning_rate_that_nobody_knows_is_asked_for() -> None:
    for rank in found():
        assert "needs the learning rates: pass optimizer=" in rank["without"]
