"""The configurations that the laws are held over, as the compressors' own test files promise them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import gradcomp

PROMISED_BYTES: dict[str, Callable[..., int]] = {}
"""Spec -> what is sent for a bucket of n entries: by any rank, of n; or by this rank, of (n, rank, world). Without local
momentum, for which conservation holds as it stands."""

for name in gradcomp.names():
    PROMISED_BYTES |= importlib.import_module(f"compressors.test_{name}").PROMISED_BYTES

ALL = list(PROMISED_BYTES)


def promised(spec: str, n: int, world: int) -> list[int]:
    """What each rank sends."""
    own = PROMISED_BYTES[spec]
    by_rank = len(inspect.signature(own).parameters) == 3
    return [own(n, rank, world) if by_rank else own(n) for rank in range(world)]
