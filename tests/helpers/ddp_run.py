"""The small net in DistributedDataParallel, with gradcomp's hook or without."""

from __future__ import annotations

from typing import Any

from doors import DDP, Training
from torch import nn

EXACT, SPARSE = "topk:ratio=1,wire=exact", "topk:ratio=0.05"
BUCKET_MB = 0.02


class DdpRun(Training):
    """A model in DDP, with a handle where there is a spec, in several buckets."""

    def __init__(self, spec: str | None, plain: nn.Module | None = None, **options: Any):
        super().__init__(DDP, plain, spec, bucket_mb=BUCKET_MB, **options)
        self.plain: Any = self.model
