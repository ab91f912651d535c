"""Predictions of one training on several clusters. What was tried for a number of ranks serves all links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gradcomp.prediction import workload
from gradcomp.prediction.predict import Cluster, Tell, lines_of, processor, try_all, wanted_of
from gradcomp.prediction.result import Prediction
from gradcomp.prediction.trial import Bucket


class Sweep:
    """The training, and what was tried of it. times: forward, backward and optimizer, in seconds. types: those of gradients."""

    def __init__(
        self,
        shapes: workload.Shapes,
        times: Mapping[str, float],
        specs: Sequence[str] | None,
        bucket_mb: float,
        device: str,
        tell: Tell,
        types: workload.Types | None = None,
    ):
        self._shapes, self._bucket_mb, self._device, self._tell = shapes, bucket_mb, workload.device_named(device), tell
        self._types = types
        self._work = workload.given(shapes, **times)
        self._wanted, self._left_out = wanted_of(specs)
        self._tried: dict[tuple[int, int | None], dict[str, list[Bucket]]] = {}

    def prediction(self, cluster: Cluster) -> Prediction:
        """Predict the steps on a cluster."""
        key, world = (cluster.ranks, cluster.hosts), cluster.world
        if key not in self._tried:
            options = world, self._bucket_mb, self._device, self._tell, self._types
            self._tried[key] = try_all(self._wanted, self._shapes, *options)
        total = sum(torch.Size(shape).numel() for shape in self._shapes.values())
        where = f"kernels timed on this {processor(self._device)}"
        return Prediction(str(cluster), where, total, lines_of(self._tried[key], self._work, cluster), self._left_out)
