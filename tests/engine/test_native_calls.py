"""A bucket makes few native calls a step: with the binding's time and Python's, they are what a short step costs the host."""

from __future__ import annotations

import math

import pytest
from native_calls import SETTLING, calls_of, resnet50, shrunk

import gradcomp
from gradcomp.engine.health import INTERVAL
from gradcomp.native import extension
from gradcomp.native.extension import MOST_PIECES

# Of gradients: collect; take and pack; add and settle; spread. Of updates: copy the weights, offer; take and pack; add and
# settle; deliver.
MOST_CALLS, MOST_CALLS_OF_UPDATES = 4, 5
# No residual's health is measured in them.
STEPS = 10
BUCKETS = 5
# The layers are so much smaller than ResNet-50's, in buckets of 25 MB.
SMALLER = 10_000


@pytest.mark.parametrize("spec", ["dense", "half", "blocks", "topk", "topk:momentum=0.9", "sdagc", "orq", "bingrad"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_bucket_makes_few_native_calls(spec: str, ranks: int, one_thread: None) -> None:
    assert SETTLING + STEPS < INTERVAL
    before = extension.native
    small = shrunk(resnet50(), SMALLER)
    buckets, calls = calls_of(spec, small, 25.0 / SMALLER, ranks, STEPS)
    most = MOST_CALLS_OF_UPDATES if gradcomp.make(spec).traits.acts_on_updates else MOST_CALLS
    assert buckets == BUCKETS and len(small) == 161
    assert 0 < sum(calls.values()) <= most * BUCKETS, calls
    assert not any(name.endswith("_scratch") for name in calls)  # sizes are asked for once
    assert extension.native is before


def test_many_layers_are_few_calls(one_thread: None) -> None:
    found = {spec: calls_of(spec, shrunk(resnet50(), 100), 25.0, 2, 3)[1] for spec in ("topk", "dense")}
    assert found["topk"]["offer_progress"] == found["topk"]["deliver_progress"] > 0
    assert found["dense"]["flatten"] == found["topk"]["flatten"] == math.ceil(161 / MOST_PIECES)
