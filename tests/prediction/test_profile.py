"""The profile of a machine that is not here: the parts of a bucket, their sizes, and a prediction for another machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradcomp
from gradcomp.core.requests import World
from gradcomp.prediction import measure, profile
from gradcomp.prediction.profile import Profile

SHAPES = {"a": (700, 1000), "b": (300, 1000)}
TIMES: dict[str, Any] = {"forward": 0.01, "backward": 0.02}
CPU = torch.device("cpu")
FOUR = World(0, 4, (0, 1, 2, 3))
COSTS = {"fixed": 2e-4, "layer": 1e-5, "entry": 3e-9, "payload": 2e-5, "byte": 1e-8}
REDUCE = {"start>reduce": COSTS, "start>reduce>end": COSTS}
MACHINE = Profile(
    "test machine",
    {"stock": REDUCE, "bf16": REDUCE, "fp16": REDUCE, "topk": {"start>gather": COSTS, "start>gather>end": COSTS}},
)


def test_sizes_are_those_of_what_arrives() -> None:
    shapes = {"a": (300, 100), "b": (100,)}
    (bucket,) = measure.measure("topk", shapes, FOUR, 25, CPU)
    (first, encoding), (last, decoding) = profile.roles_of(bucket, shapes, FOUR)
    message = bucket.parts[0].message
    assert message is not None and (first, last) == ("start>gather", "start>gather>end")
    assert encoding == {"fixed": 1, "layer": 2, "entry": 30_100, "payload": 0, "byte": 0}
    assert decoding == {**encoding, "payload": 4, "byte": 4 * message.bytes}


def test_a_prediction_has_the_costs_of_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradcomp.prediction.predict.load", {"machine": MACHINE}.get)
    specs = ["topk:ratio=0.01", "half", "accumulate:steps=2"]
    made = gradcomp.predict(SHAPES, 4, specs=specs, profile="machine", **TIMES)
    assert {line.spec for line in made.lines} == {"none", "stock", "bf16", "fp16", "topk:ratio=0.01", "accumulate:steps=2"}
    assert made.left_out == {"half": f"the profile of test machine has only times of {', '.join(MACHINE.seconds)}"}
    assert "kernels timed on test machine, as its profile says" in str(made).splitlines()[0]
    (encoding,) = {line.encoding for line in made.lines if line.spec in ("stock", "bf16")}
    assert encoding == pytest.approx(2 * (2 * 2e-4 + 2 * 1e-5 + 1_000_000 * 3e-9))  # of two buckets


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_profile_of_an_h100_comes_with_the_package(ranks: int) -> None:
    found = gradcomp.predict({f"layer {i}": (256, 512) for i in range(8)}, ranks, profile="h100", **TIMES)
    assert "kernels timed on NVIDIA H100 (host work: one thread of an AMD EPYC" in str(found).splitlines()[0]
    assert {line.spec for line in found.lines} >= {"none", "stock", "bf16", "dense", "half", "topk", "sdagc", "orq", "bingrad"}
    assert "has only times of stock" in found.left_out["gs_sgd"]
    # 4 MB are read and written in some microseconds. A bucket costs the host some tenths of a millisecond.
    assert 1e-5 < found["topk"].encoding < 5e-3 and 5e-5 < found["stock"].encoding < 5e-3


def test_rules_for_layers_are_priced_by_layer() -> None:
    assert not MACHINE.lacks("topk:warmup=100,ratio=0.01; b=topk:ratio=0.01", SHAPES)
    assert MACHINE.lacks("topk:ratio=0.01; b=dense", SHAPES)


def test_a_part_without_times_is_named() -> None:
    other = MACHINE._replace(seconds={"topk": {"start>gather": COSTS}})
    buckets = measure.measure("topk:ratio=0.01", SHAPES, FOUR, 25, CPU)
    with pytest.raises(ValueError, match=r"no times of topk:ratio=0\.01 for start>gather>end, which 4 ranks need; leave topk"):
        other.priced("topk:ratio=0.01", buckets, SHAPES, FOUR)
