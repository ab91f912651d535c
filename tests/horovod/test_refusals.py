"""What cannot work says so at once, on all ranks, naming the reason; nobody waits for anybody."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch

pytestmark = pytest.mark.slow

CASES = {
    ("adasum", "A"): "ValueError: op=Adasum reduces parameters, not gradients",
    ("adasum", "B"): "ValueError: op=Adasum cannot be compressed",
    ("min", "A"): "ValueError: the optimizer reduces gradients with op=Min, which cannot be compressed",
    ("max", "A"): "ValueError: the optimizer reduces gradients with op=Max, which cannot be compressed",
    ("product", "A"): "ValueError: the optimizer reduces gradients with op=Product, which cannot be compressed",
    ("min", "B"): "ValueError: op=Min cannot be compressed",
    ("max", "B"): "ValueError: op=Max cannot be compressed",
    ("product", "B"): "ValueError: op=Product cannot be compressed",
    ("sparse", "A"): "ValueError: sparse gradients",
    ("sparse", "B"): "ValueError: sparse gradients",
    ("sparse as dense", "A"): "ValueError: sparse gradients",
    ("sparse as dense", "B"): "ValueError: sparse gradients",
    ("float64", "A"): "TypeError: the gradient of 'float64/A.1.bias' is torch.float64",
    ("float64", "B"): "TypeError: the gradient of 'float64/B.1.bias' is torch.float64",
    ("unnamed", "A"): "ValueError: a gradient belongs to none of the named_parameters of Compression",
    ("unnamed", "B"): "ValueError: named_parameters was specified, but one or more model parameters were not named",
    ("thawed", "A"): "ValueError: a gradient belongs to none of the named_parameters of Compression",
    ("two of one name", "A"): "ValueError: named_parameters has two parameters called 'same'",
    ("two of one name", "B"): "ValueError: named_parameters has two parameters called 'same'",
    ("momentum twice", "A"): "ValueError: momentum=0.9 in the spec and the optimizer's own momentum would act twice",
    ("momentum twice", "B"): "ValueError: momentum=0.9 in the spec and the optimizer's own momentum would act twice",
    ("momentum unseen", "A"): "UserWarning: momentum=0.9 in the spec acts before compression: the optimizer's own",
}


@ranks.once
def said() -> list[dict[str, Any]]:
    return ranks.launch("horovod_refusals", 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_is_told_the_reason(case: tuple[str, str]) -> None:
    for rank in said():
        reason = rank["found"][case]
        assert reason.startswith(CASES[case]), reason


def test_after_refusals_another_optimizer_trains() -> None:
    first, second = (rank["weights"] for rank in said())
    assert first.isfinite().all()
    assert torch.equal(first, second)
