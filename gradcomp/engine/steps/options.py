"""The options of a session."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import torch

from gradcomp.engine.steps.step_observer import StepObserver

# Seeds stay below this, so that kernels can add a bucket's number to one.
LARGEST_SEED = 2**62


@dataclass(frozen=True)
class Options:
    """The options that a door passes on from its user.

    optimizer: the source of learning rates; its momentum is taken over. scaler: the GradScaler of the loss.
    bucket_mb: the largest size of a bucket of several layers, in 10^6 bytes. seed: the seed of random draws.
    observer: looks at every step, if there is one. telemetry: what the observers of all ranks do together. auto: what chooses
    other compressors, if anything.
    """

    optimizer: torch.optim.Optimizer | None
    scaler: Any
    bucket_mb: float
    seed: int
    observer: StepObserver | None = None
    telemetry: str = "off"
    auto: str = "off"

    @property
    def terms(self) -> dict[str, str]:
        """Describe the options that must be equal on all ranks."""
        return {"seed": str(self.seed), "bucket_mb": str(self.bucket_mb), "telemetry": self.telemetry, "auto": self.auto}


def check_seed(seed: Any) -> None:
    """Refuse a seed that is no whole number, or too large."""
    if not isinstance(seed, numbers.Integral) or not abs(int(seed)) < LARGEST_SEED:
        raise ValueError(f"seed={seed!r} must be a whole number between -2**62 and 2**62")
