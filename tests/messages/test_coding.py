"""Nested data and ascending indices as bytes: reading restores what was written, in as many bytes as promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradcomp.messages import ascending, structure

CASES: list[Any] = [
    {},
    [],
    None,
    {"tensor": torch.arange(3)},
    {"tensor": ["float32", [3]]},
    ["tensor", "float32", [3]],
    ["list", {"list": 1}],
    {"a": [torch.zeros(2, 0), torch.ones((), dtype=torch.float64)], "b": {"c": None, "d": "text", "e": 1.5}},
]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("data", CASES, ids=map(str, range(len(CASES))))
def test_reading_restores_the_written_data(data: Any) -> None:
    assert same(structure.read(structure.write(data)), data)


@given(data=st.data(), n=st.integers(1, 3000))
def test_indices_come_out_as_they_went_in(data: st.DataObject, n: int) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=min(n, 200))))
    wanted = torch.tensor(chosen, dtype=torch.int32)
    packed = ascending.pack(wanted, n)
    assert packed.dtype == torch.uint8 and packed.numel() == ascending.length(n, len(chosen))
    assert torch.equal(ascending.unpack(packed, n, len(chosen)), wanted.long())


@pytest.mark.parametrize("n,k,bits", [(25_000_000, 25_000, 12.0), (1_000_000, 1_000, 12.0), (1000, 500, 4.0), (64, 64, 2.1)])
def test_as_few_bits_as_promised(n: int, k: int, bits: float) -> None:
    assert 8 * ascending.length(n, k) / k <= bits
    wanted = torch.randperm(n)[:k].sort().values.to(torch.int32)
    assert torch.equal(ascending.unpack(ascending.pack(wanted, n), n, k), wanted.long())


@given(data=st.data(), n=st.integers(1, 500))
def test_no_bytes_do_harm(data: st.DataObject, n: int) -> None:
    k = data.draw(st.integers(1, n))
    size = ascending.length(n, k)
    packed = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    found = ascending.unpack(packed, n, k)
    assert found.numel() == k and bool(((found >= 0) & (found < n)).all())
