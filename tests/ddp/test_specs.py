"""Every kind of spec as a communication hook of DDP, on real ranks: what the simulator says, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch

import gradcomp

pytestmark = pytest.mark.slow

KNOBS = {"lgc": "lgc:dense=2,learn=3,ratio=0.02", "gs_sgd": "gs_sgd:ratio=0.02", "sketched_sgd": "sketched_sgd:ratio=0.02"}
RATED = "sdagc:lam=2,lr_revision=keep"  # what the simulator has no rates for
SPECS = [
    *(KNOBS.get(name, name) for name in gradcomp.names()),
    "topk:ratio=0.02,momentum=0.9,route=split",
    "orq:levels=5,route=alltoall",
    "lgc:dense=2,learn=3,ratio=0.02,instance=server,leader=rotate",
    "gtopk:ratio=0.02,momentum=0.9,clip=1",
    "topk; *.bias=dense; last.*=sign",
    RATED,
]
SUMS = ("dense", "sdagc", "gs_sgd", "topk; *.bias", "lgc")  # which of more than two terms have another order in a ring


def compared(spec: str, count: int) -> bool:
    return spec != RATED and (count == 2 or not spec.startswith(SUMS))


@ranks.once
def found(count: int) -> list[dict[str, Any]]:
    return ranks.launch("ddp_specs", count, [(spec, compared(spec, count)) for spec in SPECS])


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_all_ranks_hold_the_same_weights(spec: str, count: int) -> None:
    first, *others = (own[spec][0]["weights"] for own in found(count))
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("spec, count", [(spec, count) for spec in SPECS for count in (2, 3) if compared(spec, count)])
def test_training_is_what_the_simulator_says(spec: str, count: int) -> None:
    for own in found(count):
        trained, simulated = own[spec]
        assert torch.equal(trained["weights"], simulated["weights"])
        assert trained["stats"]["bytes_sent"] == simulated["bytes"]
        assert trained["stats"]["steps"] == 8
