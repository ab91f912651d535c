"""sdagc's state between steps."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.compressors.sdagc.capacity import Capacity
from gradcomp.compressors.sdagc.rate_revision import Ages
from gradcomp.core.compressor import Layout

# The gain with which the steering of lam begins: its largest.
FIRST_GAIN = 0.1


class SdagcState:
    """A bucket's state between steps."""

    def __init__(self, layout: Layout):
        self.n = layout.total
        self.sizes = torch.tensor(layout.sizes, dtype=torch.float64, device=layout.device)
        ends = torch.tensor(layout.sizes).cumsum(0)
        self.ends = ends.to(torch.int32).to(layout.device)
        self.thresholds = torch.zeros(len(layout.sizes), device=layout.device)
        self.lam = torch.zeros(2, device=layout.device)  # and the gain of its steering
        self.steps = 0
        self.capacity_basis: tuple[float, int] = (-1.0, 0)  # the lam and the target that the capacity follows from
        self.capacity: Capacity | None = None
        self.highest_rate = 0.0
        self.ages: Ages | None = None
        self.buffer: Tensor | None = None

    def set_lam(self, lam: float) -> None:
        """Begin anew with this lam."""
        self.lam[0], self.lam[1] = lam, FIRST_GAIN
