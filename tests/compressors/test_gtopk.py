"""gtopk: sparse sums meet in a tree, and only the k largest of each meeting go on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from compressors.test_topk import tree_bytes

import gradcomp
from gradcomp.core.requests import Payload
from gradcomp.exchanges.tree import merge_largest
from gradcomp.messages.payload import empty
from gradcomp.messages.sparse import EXACT


def _bytes(ratio: float) -> Callable[[int, int, int], int]:
    return lambda n, rank, world: tree_bytes(n, max(1, math.ceil(ratio * n)), rank, world)


PROMISED_BYTES = {"gtopk": _bytes(0.01), "gtopk:ratio=0.03": _bytes(0.03), "gtopk:ratio=0.4": _bytes(0.4)}


def sparse(entries: dict[int, float], flag: int = 0) -> Payload:
    payload = empty(EXACT.form(len(entries), len(entries)), torch.device("cpu"))
    payload["indices"].copy_(torch.tensor(sorted(entries), dtype=torch.int32))
    payload["values"].copy_(torch.tensor([entries[place] for place in sorted(entries)]))
    payload["header"].copy_(torch.tensor([len(entries), flag], dtype=torch.int32))
    return payload


def entries_of(payload: Payload) -> dict[int, float]:
    return dict(zip(payload["indices"].tolist(), payload["values"].tolist(), strict=True))


def test_a_merge_sends_on_the_largest_sums_and_names_the_dropped_ones() -> None:
    met, (values, indices) = merge_largest(sparse({3: 1.0, 7: -5.0, 9: 2.0}), sparse({3: 1.5, 8: 2.5, 9: -1.0}, flag=1))
    assert entries_of(met) == {3: 2.5, 7: -5.0, 8: 2.5}
    assert met["header"].tolist() == [3, 1]
    dropped = torch.zeros(10).index_add_(0, indices.long(), values)
    assert dropped.tolist() == [0] * 9 + [1.0]


def test_sums_that_vanish_are_entries_all_the_same() -> None:
    met, (values, _) = merge_largest(sparse({1: 2.0, 4: 0.0}), sparse({1: -2.0, 4: 0.0}))
    assert entries_of(met) == {1: 0.0, 4: 0.0}
    assert not values.any()


@pytest.mark.parametrize("world", [1, 2, 3, 6, 7])
def test_with_one_large_entry_everywhere_it_is_the_exact_mean(world: int) -> None:
    grads = [torch.zeros(50) for _ in range(world)]
    for rank, grad in enumerate(grads):
        grad[7] = 10.0 + rank
        grad[rank] = 0.1
    update = gradcomp.Simulation("gtopk:ratio=0.02", {"w": (50,)}, world).step([{"w": grad} for grad in grads])["w"]
    assert update.nonzero().flatten().tolist() == [7]
    assert update[7].item() == pytest.approx(10 + (world - 1) / 2)


def test_momentum_goes_on_where_an_entry_did_not_travel_to_the_end() -> None:
    simulation = gradcomp.Simulation("gtopk:ratio=0.1,momentum=0.5", {"w": (10,)}, 2)
    zeros = torch.zeros(10)
    first, second = zeros.clone(), zeros.clone()
    first[2], second[5] = 8.0, 4.0
    assert simulation.step([{"w": first}, {"w": second}])["w"].nonzero().flatten().tolist() == [2]
    assert simulation.residual(1)["w"][5] == 8  # the whole effect of 4, in this step and all later ones
    update = simulation.step([{"w": zeros}, {"w": zeros}])["w"]
    assert update[5].item() == pytest.approx((4 + 2) / 2)  # the share for two steps, 1 - 0.5^2
