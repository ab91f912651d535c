"""The compiled part, as type checkers see it."""

from typing import Any

most_pieces: int

def __getattr__(name: str) -> Any: ...
