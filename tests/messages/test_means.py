"""Values in two bits: signs and means of a group, their error, and the bits of an entry in a payload."""

from __future__ import annotations

import gradients
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradcomp.compressors.topk import TopK
from gradcomp.core.compressor import Acc
from gradcomp.messages import means
from gradcomp.messages import payload as payloads
from gradcomp.messages.sparse import COARSE
from gradcomp.native.memory import Memory


def rounded(values: Tensor) -> Tensor:
    return means.unpack(*means.pack(values, torch.ones(len(values), dtype=torch.bool)), len(values))


def by_definition(values: Tensor) -> Tensor:
    """Give each value of a group without zeros the mean of its part, and its sign."""
    found = []
    for group in values.double().split(means.GROUP):
        sizes = group.abs()
        upper = sizes > sizes.mean()
        mean = torch.where(upper, sizes[upper].mean(), sizes[~upper].mean())
        found.append(torch.where(group < 0, -1, 1) * mean.bfloat16())
    return torch.cat(found).float()


@given(n=st.integers(1, 700), kind=gradients.kinds, seed=gradients.seeds)
def test_a_value_becomes_the_mean_of_its_part(n: int, kind: str, seed: int) -> None:
    values = gradients.draw(kind, n, seed)
    values = torch.where(values == 0, 1e-3, values)
    assert torch.equal(rounded(values), by_definition(values))


@given(n=st.integers(1, 700), kind=gradients.kinds, seed=gradients.seeds)
def test_the_error_is_the_squares_less_those_of_the_means(n: int, kind: str, seed: int) -> None:
    """Up to the rounding of the means to 8 bits. It is never above the squares."""
    values = gradients.draw(kind, n, seed)
    found = rounded(values).double()
    error, squares = (values.double() - found).square().sum(), values.double().square().sum()
    of_means = found.square().sum()
    assert error <= squares and abs(error - (squares - of_means)) <= 2.0**-7 * of_means
    assert (found[values == 0] == 0).all()


def test_the_error_of_a_tail_is_the_one_of_theory() -> None:
    """Beyond a threshold t of e^-t, a part cut at the mean leaves (e - 2) / (e - 1) squares of the scale, of (t + 1)^2 + 1."""
    threshold = 4.6
    values = threshold + torch.empty(200_000).exponential_(generator=torch.Generator().manual_seed(1))
    share = (values - rounded(values)).square().mean() / values.square().mean()
    e = torch.e
    assert share == pytest.approx((e - 2) / (e - 1) / ((threshold + 1) ** 2 + 1), rel=0.05)


@pytest.mark.parametrize("n,ratio", [(262_144, 1 / 64), (1_000_000, 0.01), (1_000_000, 0.001), (50_000_000, 0.01)])
def test_an_entry_takes_the_bits_of_the_formula(n: int, ratio: float) -> None:
    """Of an index its low bits, one, and one for each high part; 2 of a value; an eighth for two means."""
    k = round(ratio * n)
    low = (n // k).bit_length() - 1
    bits = low + 1 + n / 2**low / k + 2 + 32 / means.GROUP
    assert 8 * payloads.size(COARSE.form(n, k)) / k == pytest.approx(bits, rel=0.01)
    assert bits < 12 + 2 + 16 / 64  # places in chunks of 4,096, and a scale for 64 entries


@given(n=st.integers(1, 3000), k=st.integers(1, 100), count=st.integers(0, 200), seed=gradients.seeds)
def test_a_payload_holds_what_was_taken(n: int, k: int, count: int, seed: int) -> None:
    """And the error comes back. Entries behind the count have no meaning."""
    k = min(k, n)
    acc = Acc(gradients.draw("normal", n, seed), Memory())
    before = acc.residual.clone()
    taken = COARSE.take(acc, k)
    taken.payload["header"][0] = count
    there = min(count, k)
    lost = taken.unpacked.values[there:].clone(), taken.unpacked.indices[there:].long()
    taken.unpacked.values[there:], taken.unpacked.indices[there:] = float("nan"), -5
    payload = COARSE.pack(taken, acc.residual)
    values, indices, _ = COARSE.read(payload)
    assert not values[there:].any()
    after = acc.residual.clone()
    after[indices[:there].long()] += values[:there]
    after[lost[1]] += lost[0]
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)


def test_the_parts_of_sparseloco_are_a_spec() -> None:
    """One entry in 64, each in 2 bits: 200 times fewer bytes than float32, where chunks with 12 bits a place have 146."""
    n = 2**20
    sent = payloads.size(COARSE.form(n, n // 64))
    assert TopK(ratio=1 / 64, wire="coarse").wire == "coarse" and 4 * n / sent > 200
