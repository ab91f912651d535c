"""Spikes: gradients that are huge, but finite, for one step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from laws import Named


def _everywhere(grads: list[Named], size: float) -> None:
    for own in grads:
        for name, grad in own.items():
            own[name] = torch.where(grad < 0, -size, size)


def _everywhere_1e38(grads: list[Named]) -> None:
    _everywhere(grads, 1e38)


def _one_entry(grads: list[Named]) -> None:
    for own in grads:
        own["weight"][3, 4] = 1e38


def _one_rank(grads: list[Named]) -> None:
    _everywhere(grads[-1:], 3e38)


def _all_ranks(grads: list[Named]) -> None:
    _everywhere(grads, 3e38)


# Each replaces a step's gradients, in place.
SPIKES: dict[str, Callable[[list[Named]], None]] = {
    "1e38 everywhere": _everywhere_1e38,
    "one entry of 1e38": _one_entry,
    "3e38 on one rank": _one_rank,
    "3e38 everywhere": _all_ranks,
}
