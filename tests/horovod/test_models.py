"""Models of unusual make: layouts, types, shapes and sharing that a gradient's way must not trip over."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from odd_models import KEPT, MODELS

pytestmark = pytest.mark.slow


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch("horovod_models", 2)


@pytest.mark.parametrize("route", ["A", "B"])
@pytest.mark.parametrize("spec", ["dense", "topk:ratio=1,wire=exact"])
@pytest.mark.parametrize("model", MODELS)
def test_with_nothing_left_out_training_is_the_one_by_hand(model: str, spec: str, route: str) -> None:
    """To the last bit: on two ranks a sum has one order, and half of it is exact."""
    for rank in found():
        ours, _ = rank[model, route, spec]
        assert ours.isfinite().all()
        assert torch.equal(ours, rank[model])


@pytest.mark.parametrize("route", ["A", "B"])
@pytest.mark.parametrize("model", MODELS)
def test_all_ranks_hold_the_same_weights_to_the_last_bit(model: str, route: str) -> None:
    (first, types), (second, _) = (rank[model, route, "topk:ratio=0.05"] for rank in found())
    assert torch.equal(first, second)
    assert not torch.equal(first, found()[0][model, route, "dense"][0])  # something was left out indeed
    expected = {"bfloat16": {"torch.bfloat16"}, "float16": {"torch.float16"}}.get(model)
    assert expected is None or set(types) == expected


@pytest.mark.parametrize("route", ["A", "B"])
@pytest.mark.parametrize("model", KEPT)
def test_what_waits_and_the_update_are_the_gradients(model: str, route: str) -> None:
    """In the parameters' shapes, whatever their layout: the ranks' means add up."""
    first, second = (rank["waiting", model, route] for rank in found())
    assert any(kept.any() for kept, _, _ in first.values())
    for name, (kept, gradient, update) in first.items():
        assert kept.shape == gradient.shape == update.shape
        torch.testing.assert_close((kept + second[name][0]) / 2 + update, (gradient + second[name][1]) / 2)


def test_stock_horovod_takes_no_bfloat16() -> None:
    """What the bfloat16 cases above are worth: without gradcomp it cannot be done."""
    for rank in found():
        assert rank["stock bfloat16"].startswith("ValueError: Tensor type torch.BFloat16Tensor is not supported")
