"""Before the first exchange, and again after a new start, the ranks compare what they exchange; if it differs, all raise."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch

pytestmark = pytest.mark.slow

TERMS = {
    "spec": "spec: rank 0 has 'topk:ratio=0.05', rank 1 has 'topk:ratio=0.06'",
    "version": "gradcomp's version: rank 0 has '0.1.0', rank 1 has '9.9'",
    "seed": "seed: rank 0 has '7', rank 1 has '8'",
    "bucket_mb": "bucket_mb: rank 0 has '2', rank 1 has '3'",
    "names": "parameter names: ",
    "shapes": "parameter shapes: ",
    "layout": "parameter shapes: ",
    "count": "parameter names: rank 0 has '4: ",
    "state": "compressor's state: rank 0 has 'dense, 0 steps done, ",
}


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch("horovod_agreement", 3, anew=2)


@pytest.mark.parametrize("route", ["A", "B"])
@pytest.mark.parametrize("term", TERMS)
def test_all_ranks_raise_naming_the_term(term: str, route: str) -> None:
    for rank in found():
        text = rank[term, route]
        assert text.startswith(
            "ValueError: the ranks do not agree and cannot exchange gradients; make these equal on all ranks: "
        ), text
        assert TERMS[term] in text
    assert len({rank[term, route] for rank in found()}) == 1, "all ranks hold the same records, so all say the same"


@pytest.mark.parametrize("route", ["A", "B"])
def test_training_goes_on_after_a_new_start_with_what_was_not_sent(route: str) -> None:
    """hvd.shutdown() and hvd.init() on all ranks, as in an elastic reset: the same weights as without, to the last bit."""
    for rank in found():
        assert torch.equal(rank["weights", "broken", route], rank["weights", "whole", route])
        assert torch.equal(rank["weights", "broken", route], found()[0]["weights", "broken", route])


@pytest.mark.parametrize("route", ["A", "B"])
def test_after_a_new_start_the_ranks_compare_again(route: str) -> None:
    for rank in found():
        for name in ("broken", "whole"):
            text = rank["again", name, route]
            assert text == (
                "ValueError: the ranks do not agree and cannot exchange gradients; make these equal on all ranks: "
                "spec: rank 0 has 'topk:ratio=0.05', rank 1 has 'another'"
            )
