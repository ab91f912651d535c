"""The configurations that the laws are held over, as the compressors' own test files promise them."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import gradcomp

PROMISED_BYTES: dict[str, Callable[[int], int]] = {}
"""Spec -> what a rank sends for a bucket of n entries. Without local momentum, for which conservation holds as it stands."""

for name in gradcomp.names():
    PROMISED_BYTES |= importlib.import_module(f"compressors.test_{name}").PROMISED_BYTES

ALL = list(PROMISED_BYTES)
