"""The options of a session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Options:
    """The options that a door passes on from its user.

    optimizer: the source of learning rates; its momentum is checked against the spec's. scaler: the GradScaler of the loss.
    bucket_mb: the largest size of a bucket of several layers, in 10^6 bytes. seed: the seed of random draws.
    """

    optimizer: torch.optim.Optimizer | None
    scaler: Any
    bucket_mb: float
    seed: int
