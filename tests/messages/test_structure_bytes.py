"""Nested data as bytes: reading restores the written data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradcomp.messages import structure

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
