"""The compiled part, as type checkers see it."""

from typing import Any

most_pieces: int
cuda_version: int
built_with_cuda: bool

def __getattr__(name: str) -> Any: ...
