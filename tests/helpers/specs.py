"""The configurations that the laws are held over, as the compressors' own test files promise them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

import gradcomp

COMPRESSORS = Path(__file__).resolve().parents[1] / "compressors"
# The bytes sent for a bucket of n entries, by spec: a function of n for any rank, or of (n, rank, world) for this rank.
# The specs have no local momentum, with which conservation would not hold as it stands.
PROMISED_BYTES: dict[str, Callable[..., int]] = {}

for name in gradcomp.names():
    folder = f"compressors.{name}" if (COMPRESSORS / name).is_dir() else "compressors"
    PROMISED_BYTES |= importlib.import_module(f"{folder}.test_{name}").PROMISED_BYTES

ALL = list(PROMISED_BYTES)


def promised(spec: str, n: int, world: int) -> list[int]:
    """List the bytes that each rank sends."""
    own = PROMISED_BYTES[spec]
    by_rank = len(inspect.signature(own).parameters) == 3
    return [own(n, rank, world) if by_rank else own(n) for rank in range(world)]
