"""A machine profile: lines through times, the way through a file, and a prediction for another machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gradcomp
from gradcomp.core.requests import World
from gradcomp.prediction import measure, profile
from gradcomp.prediction.predict import measured
from gradcomp.prediction.profile import Costs

SHAPES = {"a": (700, 1000), "b": (300, 1000)}
TIMES = {"forward": 0.01, "backward": 0.02}
CPU = torch.device("cpu")
FOUR = World(0, 4, (0, 1, 2, 3))
COSTS = Costs(2e-4, 1e-5, 3e-9, 0.0, 2e-5, 1e-8)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "EFFORT", measure.Effort(seconds=0.0))


@pytest.fixture(scope="module")
def here() -> profile.Profile:
    """A profile of this machine, of few buckets that take little time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "EFFORT", measure.Effort(settling=2, counted=1, seconds=0.0))
        patch.setattr(profile, "SIZES", ((64, 4, 2), (64, 16, 8)))
        return profile.profile_here(["topk"], "test machine", lambda *args: measured(*args, 1e6, CPU))


def test_a_line_is_found_again() -> None:
    """Of any terms, from sizes that differ in all of them."""
    sizes = [
        Costs(1, layers, entries, max(0, entries - profile.CACHED), payloads, 0.01 * entries * payloads)
        for layers, entries, payloads in [(4, 1e4, 2), (64, 1e5, 8), (16, 1e6, 2), (8, 1e6, 32), (4, 4e6, 4), (32, 6e6, 16)]
    ]
    found = profile.fit([(size, COSTS.seconds(size)) for size in sizes])
    for size in sizes:
        assert found.seconds(size) == pytest.approx(COSTS.seconds(size), rel=0.1)
    assert all(each >= 0 for each in found)


def test_sizes_are_those_of_what_arrives() -> None:
    shapes = {"a": (300, 100), "b": (100,)}
    (bucket,) = measure.measure("topk", shapes, FOUR, 25, CPU)
    (first, encoding), (last, decoding) = profile.roles_of(bucket, shapes, FOUR)
    message = bucket.parts[0].message
    assert message is not None and (first, last) == ("start>gather", "start>gather>end")
    assert encoding == Costs(1, 2, 30_100, 0, 0, 0)
    assert decoding == Costs(1, 2, 30_100, 0, 4, 4 * message.bytes)


def test_a_profile_goes_through_a_file(here: profile.Profile, tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(json.dumps(here.json()))
    found = profile.load(tmp_path / "machine.json")
    assert found.json() == here.json()
    made = gradcomp.predict(
        SHAPES, 4, specs=["topk:ratio=0.01", "half", "accumulate:steps=2"], profile=tmp_path / "machine.json", **TIMES
    )
    assert {line.spec for line in made.lines} == {"none", "stock", "bf16", "fp16", "topk:ratio=0.01", "accumulate:steps=2"}
    assert made.left_out["half"].startswith("the profile of test machine has no times of it; it has stock, bf16, fp16, topk")
    assert "kernels timed on test machine, as its profile says" in str(made).splitlines()[0]


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_profile_of_an_h100_comes_with_the_package(ranks: int) -> None:
    found = gradcomp.predict({f"layer {i}": (256, 512) for i in range(8)}, ranks, profile="h100", **TIMES)
    head = str(found).splitlines()[0]
    assert "kernels timed on NVIDIA H100; host work timed on one thread of an AMD EPYC" in head
    assert {line.spec for line in found.lines} >= {"none", "stock", "bf16", "dense", "half", "topk", "sdagc", "orq", "bingrad"}
    assert "no times of it; it has stock" in found.left_out["gs_sgd"]
    # 4 MB are read and written in some microseconds. A bucket costs the host some tenths of a millisecond.
    assert 1e-5 < found["topk"].encoding < 5e-3 and 5e-5 < found["stock"].encoding < 5e-3


def test_rules_for_layers_are_priced_by_layer(here: profile.Profile) -> None:
    assert here.missing("topk:warmup=100; b=topk", SHAPES) is None
    assert "no times of dense" in str(here.missing("topk; b=dense", SHAPES))


@pytest.mark.parametrize(
    "change,said",
    [
        ({"machine": None}, "machine"),
        ({"seconds": []}, "no attribute 'items'"),
        ({"seconds": {"stock": {}}}, "lacks stock, bf16 or fp16"),
        ({"seconds": {"stock": {"start>end": {"fixed": -1}}}}, "fixed is -1 seconds"),
        ({"seconds": {"stock": {"start>end": {"fixed": 0, "byt": 1}}}}, "no term 'byt'"),
    ],
)
def test_a_bad_file_gets_a_sentence(change: dict[str, Any], said: str, here: profile.Profile, tmp_path: Path) -> None:
    content = {**here.json(), **change}
    (tmp_path / "bad.json").write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    with pytest.raises(ValueError, match=rf"bad.json is no machine profile \(.*{said}.*python -m gradcomp profile FILE"):
        gradcomp.predict(SHAPES, 4, profile=tmp_path / "bad.json", **TIMES)


@pytest.mark.parametrize(
    "options,said",
    [
        ({"profile": "nothing"}, "nothing is no machine profile"),
        ({"profile": "h100", "device": "cpu"}, "give one of them"),
        ({"profile": "h100", "loss": lambda: None, "forward": None, "backward": None}, "pass forward= and backward="),
    ],
)
def test_what_does_not_fit_a_profile_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        gradcomp.predict(SHAPES, 4, **{**TIMES, **options})


def test_a_part_without_times_is_named(here: profile.Profile) -> None:
    shapes = {"a": (100, 100)}
    other = here._replace(costs={**here.costs, "topk": {"start>gather": COSTS}})
    buckets = measure.measure("topk", shapes, FOUR, 25, CPU)
    with pytest.raises(ValueError, match="no times of topk for start>gather>end, which 4 ranks need; leave topk out"):
        other.priced("topk", buckets, shapes, FOUR)


def _predicted(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradcomp", "predict", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: profile.Profile) -> None:
    (tmp_path / "shapes.json").write_text(json.dumps({"a": [100, 100]}))
    (tmp_path / "machine.json").write_text(json.dumps(here.json()))
    words = ["--model", str(tmp_path / "shapes.json"), "--ranks", "4", "--forward", "1ms", "--backward", "2ms"]
    done = _predicted(*words, "--profile", str(tmp_path / "machine.json"))
    assert done.returncode == 0, done.stderr
    assert (
        "test machine" in done.stdout
        and "sketched_sgd, terngrad: the profile of test machine has no times of it; it has stock" in done.stdout
    )
    done = _predicted(*words, "--profile", str(tmp_path / "none.json"))
    assert done.returncode == 2 and "none.json is no machine profile" in done.stderr and "Traceback" not in done.stderr
    monkeypatch.setattr(profile, "SIZES", ((16, 2, 2),))
    from gradcomp.__main__ import main

    main(["profile", str(tmp_path / "new.json"), "--specs", "topk", "lgc"])
    assert profile.load(tmp_path / "new.json").costs.keys() == {"stock", "bf16", "fp16", "topk"}
