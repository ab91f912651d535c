"""The figures of a bucket after a step: what its update holds, how much waits, and for how long."""

from __future__ import annotations

from typing import Any

import torch

from gradcomp.engine.buckets.bucket import Bucket
from gradcomp.engine.buckets.health import OLD, PART
from gradcomp.native import kernels
from gradcomp.native.memory import HostCopy, Update


class BucketFigures:
    """Figures on their way to main memory. Made when the bucket's update is there, and its entries are out of the residual."""

    def __init__(self, bucket: Bucket, update: Update):
        self._names, self._entries = bucket.layout.names, bucket.layout.total
        state, device = bucket.state, bucket.layout.device
        found = torch.zeros(3, dtype=torch.float64, device=device)
        found[0] = update.flat.count_nonzero()
        self._waits = bucket.collector.keeps_residual
        if self._waits:
            kernels.sum_squares([state.residual], found[1:2])
        self._has_ages = state.sent_in is not None
        if state.sent_in is not None:
            for part in state.sent_in.split(PART):
                found[2] += (state.steps % 256 - part).clamp_(max=OLD).sum(dtype=torch.int64)  # modulo 256, as they are kept
        self._found = HostCopy(found)

    def read(self) -> dict[str, Any]:
        """Return the figures. age: mean steps since an entry was last sent; more than OLD count as OLD."""
        nonzero, squares, ages = self._found.all()
        figures = {
            "layers": list(self._names),
            "entries": self._entries,
            "density": nonzero / self._entries,
            "residual": squares**0.5,
        }
        return {**figures, "age": ages / self._entries} if self._has_ages else figures
