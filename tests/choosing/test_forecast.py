"""The forecast: a smaller trial stands for the whole, and hidden layers stay gentle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradcomp
from gradcomp.choosing import forecast
from gradcomp.choosing.forecast import Forecast
from gradcomp.choosing.ways import FIRST, STOCK, Way
from gradcomp.core.compressor import Layer
from gradcomp.core.requests import World
from gradcomp.prediction import workload
from gradcomp.prediction.link import Measured
from gradcomp.prediction.timeline import Work
from gradcomp.prediction.trial import Bucket, Part

CPU = torch.device("cpu")
WORLD = World(0, 4, (0, 1, 2, 3))
SIZES = {"first": 3_000_000, "bias": 300, "middle": 3_000_000, "last": 3_000_000}
LAYERS = {name: Layer(size, CPU) for name, size in SIZES.items()}
HALF, LEVELS = Way("half"), Way("orq:levels=5")


def times(each: float) -> Measured:
    return Measured(dict.fromkeys(("reduce", "gather", "send"), (1e-4, each)))


def work(backward: float) -> Work:
    return workload.given({name: (size,) for name, size in SIZES.items()}, 0.01, backward, 0.0)


@pytest.fixture(scope="module")
def made() -> Forecast:
    return Forecast(LAYERS, 8.0, WORLD)


def test_groups_hold_every_layer_once_in_the_order_of_backward(made: Forecast) -> None:
    assert [name for group in made.groups for name in group] == [*reversed(SIZES)]
    assert len(made.groups) == 3
    assert len(Forecast({"w": LAYERS["first"]}, 25, WORLD).groups) == 1


def test_a_slow_link_costs_its_bytes(made: Forecast) -> None:
    """Hidden behind nothing: the bytes at the link's rate, beside which kernels are small."""
    total = 4 * sum(SIZES.values())
    assert made.seconds(STOCK, work(0.0), times(1e-6)) == pytest.approx(1e-6 * total, rel=0.1)
    there_and_back = 3 / 4 + 1 / 4  # of the entries: the parts of the others, and the sums of its own
    assert made.seconds(HALF, work(0.0), times(1e-6)) == pytest.approx(1e-6 * total / 2 * there_and_back, rel=0.1)


@pytest.mark.parametrize("spec", ["half", "orq:levels=5", "topk", "sdagc"])
def test_a_trial_of_smaller_layers_sends_its_part(made: Forecast, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a trial in which no layer is made smaller."""

    def sent(one: Forecast) -> int:
        parts = (part for i in range(len(one.groups)) for bucket in one._buckets(spec, i) for part in bucket.parts)
        return sum(part.message.bytes for part in parts if part.message is not None)

    small = sent(made)
    monkeypatch.setattr(forecast, "MOST_ENTRIES", 10**9)
    assert small == pytest.approx(sent(Forecast(LAYERS, 8.0, WORLD)), rel=0.05)


def test_what_does_not_grow_with_the_entries_is_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python and launches take as long for a small layer as for a large one."""

    def tried(spec: str, shapes: Any, *_: Any) -> list[Bucket]:
        entries = sum(torch.Size(shape).numel() for shape in shapes.values())
        return [Bucket(tuple(shapes), (Part(0.01 + 1e-9 * entries, None),))]

    monkeypatch.setattr(forecast, "try_out", tried)
    large = Forecast({str(i): Layer(10**8, CPU) for i in range(3)}, 25, WORLD)
    seconds = [part.seconds for i in range(3) for bucket in large._buckets("topk", i) for part in bucket.parts]
    assert seconds == pytest.approx([0.11] * 3, rel=1e-3)


def test_buckets_of_stock_keep_their_share_in_a_smaller_trial(made: Forecast) -> None:
    """A trial of a part must not put layers into one bucket that DistributedDataParallel would exchange apart."""
    large = Forecast({str(i): Layer(2**20, CPU) for i in range(64)}, 25, WORLD)
    counts = [len(bucket.names) for i in range(len(large.groups)) for bucket in large._buckets("stock", i)]
    assert max(counts) == 7  # of 4 MiB each


@pytest.mark.parametrize("spec", ["half", "orq:levels=5", "half:by_host=true", "orq:levels=5,route=allgather"])
@pytest.mark.parametrize("bucket_mb", [0.4, 2.0, 25])
def test_a_smaller_trial_takes_the_route_of_the_whole(spec: str, bucket_mb: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether gradients go to all ranks, or parts to the ranks that add them up, depends on a bucket's size."""
    layers = {str(i): Layer(100_000, CPU) for i in range(40)}
    world = World(0, 8, (0, 0, 1, 1, 2, 2, 3, 3) if "by_host" in spec else tuple(range(8)))

    def kinds(most: int) -> set[str]:
        monkeypatch.setattr(forecast, "MOST_ENTRIES", most)
        one = Forecast(layers, bucket_mb, world)
        parts = (part for i in range(len(one.groups)) for bucket in one._buckets(spec, i) for part in bucket.parts)
        return {part.message.kind for part in parts if part.message is not None}

    assert kinds(2**17) == kinds(10**9)


def test_stock_sends_gradients_in_their_own_type() -> None:
    half = Forecast(LAYERS, 8.0, WORLD, dict.fromkeys(LAYERS, torch.bfloat16))
    assert half.seconds(STOCK, work(0.0), times(1e-6)) == pytest.approx(1e-6 * 2 * sum(SIZES.values()), rel=0.1)


def test_layers_behind_backward_stay_dense(made: Forecast) -> None:
    """With a link that carries two of three groups during backward, only the one that comes last needs fewer bytes."""
    ways = [FIRST, HALF, LEVELS]
    mixed = made.mixed([ways[i] for i in made.by_group(ways, work(6.0), times(1.5e-7))])
    assert mixed is not None and not mixed.keeps
    compressor: Any = gradcomp.make(mixed.spec)
    chosen = {name: compressor.choose(name, LAYERS[name]).name for name in SIZES}
    assert chosen["last"] == chosen["middle"] == "dense" and chosen["first"] == "orq"
    uniform = min(made.seconds(way, work(6.0), times(1.5e-7)) for way in (HALF, LEVELS))
    assert made.seconds(mixed, work(6.0), times(1.5e-7)) < 1.02 * uniform


def test_no_mixture_where_one_way_is_best(made: Forecast) -> None:
    assert made.by_group([FIRST, HALF, LEVELS], work(0.0), times(1e-6)) == [2, 2, 2]
    assert made.mixed([LEVELS] * 3) is None
    odd = Forecast({f"a[{i}]": Layer(3_000_000, CPU) for i in range(3)}, 8.0, WORLD)
    assert odd.mixed([FIRST, LEVELS, LEVELS]) is None, "a pattern could mean another layer"
