"""The carrier: the number that Horovod reduces tells the operation, and refuses those that cannot be compressed."""

from __future__ import annotations

import math

import pytest
import torch

from gradcomp.horovod.compression import CARRIER, scale_of_carrier


@pytest.mark.parametrize("size", [2, 3, 4, 7, 100, 1024])
@pytest.mark.parametrize("predivide", [1.0, 2.0, 3.0])
def test_the_carrier_tells_average_from_sum_and_refuses_the_rest(size: int, predivide: float) -> None:
    numbers = [rank + CARRIER for rank in range(size)]
    mean = torch.tensor([x / predivide for x in numbers]).sum().item() * predivide / size
    assert scale_of_carrier(mean, size) == 1
    assert scale_of_carrier(sum(numbers), size) == size
    for op, result in {"Min": min(numbers), "Max": max(numbers), "Product": math.prod(numbers[:30])}.items():
        with pytest.raises(ValueError, match=f"op={op}, which cannot be compressed; use op=Average or op=Sum"):
            scale_of_carrier(result, size)
    with pytest.raises(ValueError, match="process set"):
        scale_of_carrier(1.25, size)


def test_one_rank_alone_is_average() -> None:
    assert scale_of_carrier(2.0, 1) == 1
