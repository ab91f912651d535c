"""Predictions of one training on several clusters. What was tried for a number of ranks serves all links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradcomp.prediction import workload
from gradcomp.prediction.predict import Cluster, Tell, lines_of, prediction_of, try_all, wanted_of
from gradcomp.prediction.profile import Profile
from gradcomp.prediction.result import Prediction
from gradcomp.prediction.trial import Bucket


class Sweep:
    """The training, and what was tried of it. times: forward, backward and optimizer, in seconds. types: those of gradients.

    machine: that is predicted for, in place of this one.
    """

    def __init__(
        self,
        shapes: workload.Shapes,
        times: Mapping[str, float],
        specs: Sequence[str] | None,
        bucket_mb: float,
        device: str,
        tell: Tell,
        types: workload.Types | None = None,
        machine: Profile | None = None,
    ):
        self._shapes, self._bucket_mb, self._device, self._tell = shapes, bucket_mb, workload.device_named(device), tell
        self._types, self._machine = types, machine
        self._work = workload.given(shapes, **times)
        self._wanted, self._left_out = wanted_of(specs, shapes, machine)
        self._tried: dict[tuple[int, int | None], dict[str, list[Bucket]]] = {}

    def prediction(self, cluster: Cluster) -> Prediction:
        """Predict the steps on a cluster."""
        key, world = (cluster.ranks, cluster.hosts), cluster.world
        if key not in self._tried:
            options = world, self._bucket_mb, self._device, self._tell, self._types, self._machine
            self._tried[key] = try_all(self._wanted, self._shapes, *options)
        lines = lines_of(self._tried[key], self._work, cluster)
        return prediction_of(self._shapes, lines, self._left_out, cluster, self._device, self._machine)
