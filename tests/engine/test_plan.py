"""The plan of buckets: models of more entries than 32 bits count, of which no entry is allocated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradcomp
from gradcomp.core.compressor import Layer
from gradcomp.engine.plan import MOST_ENTRIES, Plan, plan
from gradcomp.engine.slots import Parameters
from gradcomp.messages import ascending, payload
from gradcomp.messages.sparse import CODECS
from gradcomp.native import extension, kernels

CPU = torch.device("cpu")
LARGE = 2**20 * 100


def layers(*sizes: int) -> dict[str, Layer]:
    return {f"{i}.weight": Layer(size, CPU, 2) for i, size in enumerate(sizes)}


def planned(spec: str, bucket_mb: float, *sizes: int) -> list[Plan]:
    return plan(layers(*sizes), bucket_mb, gradcomp.make(spec))


@pytest.mark.parametrize("bucket_mb", [25, 1000, 1e9])
def test_a_model_of_more_entries_than_32_bits_has_buckets_of_fewer(bucket_mb: float) -> None:
    sizes = [LARGE, 3, 1000, LARGE + 7] * 20
    buckets = planned("topk", bucket_mb, *sizes)
    assert sum(sizes) > 2**31
    assert [name for bucket in buckets for name in bucket.layout.names] == [*reversed(layers(*sizes))]
    assert sum(bucket.layout.total for bucket in buckets) == sum(sizes)
    assert all(bucket.layout.total <= max(MOST_ENTRIES, LARGE + 7) for bucket in buckets)
    for bucket in buckets:
        assert bucket.layout.spans[-1][1] == bucket.layout.total
    assert len(buckets) == {25: 60, 1000: 20, 1e9: 2}[bucket_mb]


def test_parameters_of_a_model_that_lies_nowhere_are_planned() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**15, 2**14, bias=False) for _ in range(5)))
    found = Parameters(model.named_parameters())
    assert sum(layer.size for layer in found.layers.values()) == 5 * 2**29 > 2**31
    assert [bucket.layout.total for bucket in plan(found.layers, 1e6, gradcomp.make("sdagc"))] == [3 * 2**29, 2 * 2**29]


@pytest.mark.parametrize("spec", ["dense", "topk", "orq", "topk; 1.*=dense"])
def test_a_layer_of_too_many_entries_is_refused_by_name(spec: str) -> None:
    assert planned(spec, 25, 8, MOST_ENTRIES)[0].layout.total == MOST_ENTRIES
    with pytest.raises(ValueError, match=r"the layer '1\.weight' has 2147483648 entries, but a layer that is exchanged"):
        planned(spec, 25, 8, MOST_ENTRIES + 1)


def test_a_whole_model_of_too_many_entries_is_refused() -> None:
    spec = "topk:clip=1.0,clip_by=model"
    assert len(planned(spec, 25, 2**30, 2**30 - 1)) == 1
    with pytest.raises(
        ValueError, match=r"clip_by=model needs the whole model in one bucket, but the model has 2147483648 ent"
    ):
        planned(spec, 25, 2**30, 2**30)


@pytest.mark.parametrize("capacity", [1, 2**20, 2**30, MOST_ENTRIES])
@pytest.mark.parametrize("wire", CODECS)
def test_bytes_of_the_largest_payloads_are_counted_in_full(wire: str, capacity: int) -> None:
    form = CODECS[wire].form(MOST_ENTRIES, capacity)
    whole = {
        "exact": 8 * capacity,
        "compact": 4 * kernels.packed_words(MOST_ENTRIES, capacity) + 4 * 2**15,
        "coarse": ascending.length(MOST_ENTRIES, capacity) + 4 * -(-capacity // 256) + -(-capacity // 4),
    }[wire]
    assert whole <= payload.size(form) <= whole + 64
    assert kernels.packed_words(MOST_ENTRIES, capacity) * 32 >= capacity * 7


def test_the_scratch_of_the_largest_buckets_is_counted_in_full(device: torch.device) -> None:
    """Scratch for twice as many entries is about twice as much: no product of its formulas wraps around."""
    for count in (f"{name}_scratch" for name in ("take_topk", "take_above", "heaviest", "collect")):
        words = getattr(extension.native, count)
        for most in (1, 224) if count.startswith("collect") else (1, 2**20, 2**29):
            half, whole = words(device.type == "cuda", 2**30, most), words(device.type == "cuda", MOST_ENTRIES, most)
            assert 0 < half <= whole <= 2 * half


def test_kernels_refuse_an_array_of_too_many_entries() -> None:
    """The array is never touched, so that it takes no memory."""
    array, few = torch.empty(2**31), torch.zeros(4)
    places, header = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"residual has 2147483648 entries, but a bucket must stay below 2\^31"):
        kernels.take_topk(array, 4, few, places, header)
