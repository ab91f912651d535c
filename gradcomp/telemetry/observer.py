"""The observer of one rank's steps: it compares with dense, checks the replicas, and makes records for the user's writers."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.requests import Gather, Reduce
from gradcomp.engine.bucket import Bucket
from gradcomp.engine.clock import Seconds, StepClock
from gradcomp.engine.reducer import Reducer, StepObserver
from gradcomp.engine.session import Session
from gradcomp.engine.stages.feedback import Residual
from gradcomp.engine.stages.health import OLD, PART, Health
from gradcomp.messages import payload as payloads
from gradcomp.native import kernels
from gradcomp.native.memory import HostCopy, Update
from gradcomp.networks import Answer
from gradcomp.telemetry import replicas
from gradcomp.telemetry.comparison import Comparison

# A record: names, and figures that JSON knows.
Record = dict[str, Any]
Writer = Callable[[Record], object]


@dataclass(frozen=True)
class Intervals:
    """Steps from one record to the next, from one comparison with dense to the next, and likewise of checks; 0 = none."""

    record: int = 50
    compare: int = 500
    check: int = 1000

    def __str__(self) -> str:
        return f"a comparison every {self.compare} steps, a check of the replicas every {self.check}"


class Observer(StepObserver):
    """An observer of one rank. On a GPU, figures are read one step later, so that no step waits for the device.

    watched: a weak proxy of the session, which has the observer. weights: all parameters, by name; None where there are none.
    steps_follow: decides whether this rank's weights are stepped after the exchange.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        intervals: Intervals,
        watched: Session,
        weights: Mapping[str, Tensor] | None = None,
        steps_follow: Callable[[], bool] = lambda: True,
    ):
        self.intervals, self._writers = intervals, [*writers]
        self._watched, self._weights, self._steps_follow = watched, weights, steps_follow
        self._comparison: Comparison | None = None
        self._figures: dict[int, BucketFigures] = {}
        self._asked: list[Callable[[], None]] = []
        self._late: list[Callable[[], None]] = []
        self._compared: dict[str, float] = {}
        self._bytes = self._bytes_between_hosts = self._counted = 0
        self._counted_spec = ""
        self._clock: StepClock | None = None
        self._until_last = Seconds()

    @property
    def _step(self) -> int:
        return self._watched.reducer.steps_done + 1

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self._step % interval == 0

    def before(self, bucket: Bucket) -> None:
        if self._is_due(self.intervals.compare):
            if self._comparison is None or self._comparison.step != self._step:
                self._comparison = Comparison(self._step)
            self._comparison.before(bucket)

    def collected(self, bucket: Bucket) -> None:
        if self._is_due(self.intervals.compare) and self._comparison is not None:
            self._comparison.collected(bucket)

    def delivered(self, bucket: Bucket, update: Update) -> None:
        if self._is_due(self.intervals.compare) and self._comparison is not None:
            self._comparison.delivered(bucket, update)
        if self._writers and self._is_due(self.intervals.record):
            self._figures[bucket.index] = BucketFigures(bucket, update)

    def discard(self) -> None:
        self._comparison = None
        self._figures.clear()
        self._asked.clear()

    def step_done(self, reducer: Reducer) -> None:
        late, self._late = self._late, []
        for each in late:
            each()
        if (spec := self._watched.spec) != self._counted_spec:  # a record tells of one spec
            self._counted_spec, self._bytes, self._bytes_between_hosts, self._counted = spec, 0, 0, 0
        self._bytes += reducer.bytes_sent
        self._bytes_between_hosts += reducer.bytes_between_hosts
        self._counted += 1
        step, network, weights = reducer.steps_done, reducer.network, self._weights
        comparison, self._comparison = self._comparison, None
        if comparison is not None and comparison.step == step:
            added = comparison.joined_added()
            answer = network.start(Reduce(added, 1 / network.world.size), "telemetry's comparison")
            self._asked.append(lambda: self._compare(comparison, answer))
        if weights is not None and self.intervals.check and step % self.intervals.check == 0:
            digests = payloads.wrap(replicas.digests(weights, self._steps_follow()))
            found = network.start(Gather(digests), "telemetry's check of the replicas")
            self._asked.append(lambda: self._check([*weights], found, step))
        if self._figures:
            self._asked.append(lambda: self._record(reducer, step))

    def conclude(self) -> None:
        asked, self._asked = self._asked, []
        for each in asked:
            each()

    def _compare(self, comparison: Comparison, answer: Answer) -> None:
        mean = answer()
        assert isinstance(mean, Tensor)
        found, spec = HostCopy(comparison.figures(mean)), self._watched.spec

        def read() -> None:
            cosine, error = found.all()
            self._compared = {"cosine": cosine, "relative_error": error} if self._watched.spec == spec else {}

        self._read(read, mean)

    def _check(self, names: Sequence[str], answer: Answer, step: int) -> None:
        replies = answer()
        assert isinstance(replies, list)
        found = [HostCopy(reply["bytes"]) for reply in replies]
        self._read(lambda: replicas.check(names, [[int(x) for x in own.all()] for own in found], step), replies[0]["bytes"])

    def _record(self, reducer: Reducer, step: int) -> None:
        figures, self._figures = self._figures, {}
        record: Record = {"step": step, "time": time.time(), "rank": reducer.network.world.rank, "spec": self._watched.spec}
        counted = max(1, self._counted)
        dense = 4 * sum(layer.size for layer in reducer.layers.values())
        sent = self._bytes / counted
        record |= {
            "bytes_sent": sent,
            "bytes_between_hosts": self._bytes_between_hosts / counted,
            "compression": dense / sent if sent else None,
        }
        self._bytes = self._bytes_between_hosts = self._counted = 0
        if reducer.clock is not self._clock:  # a change of spec makes a new one
            self._clock, self._until_last = reducer.clock, Seconds()
        now = replace(reducer.clock.seconds)
        seconds, self._until_last = now.less(self._until_last), now
        record["seconds"] = seconds.by_step() if seconds.steps else None
        health = {bucket.index: bucket.states[Health.name] for bucket in reducer.buckets if Health.name in bucket.states}

        def write() -> None:
            buckets = [figures[index].read() for index in sorted(figures)]
            for own, index in zip(buckets, sorted(figures), strict=True):
                if index in health:
                    own |= health[index].figures
            entries = sum(own["entries"] for own in buckets)
            record["density"] = sum(own["density"] * own["entries"] for own in buckets) / max(1, entries)
            record["residual"] = math.sqrt(sum(own["residual"] ** 2 for own in buckets))
            compared, self._compared = self._compared, {}
            record.update({name: figure for name, figure in compared.items() if math.isfinite(figure)})
            record["warnings"] = [own.warning for own in health.values() if own.warning]
            record["buckets"] = buckets
            self._writers = [writer for writer in self._writers if _takes(writer, record)]

        self._read(write, reducer.buckets[0].residual)

    def _read(self, read: Callable[[], None], where: Tensor) -> None:
        """Read figures: at once, or one step later if they lie on a GPU."""
        if where.is_cuda:
            self._late.append(read)
        else:
            read()


def _takes(writer: Writer, record: Record) -> bool:
    """Give a record to a writer. One that fails is warned of and gets no more: a full disk must not end a training."""
    try:
        writer(copy.deepcopy(record))
    except Exception as error:
        warnings.warn(f"the telemetry's writer {writer!r} gets no more records, since it failed: {error!r}", stacklevel=2)
        return False
    return True


class BucketFigures:
    """The figures of a bucket after a step, on their way to main memory: its update, its residual and how long entries wait."""

    def __init__(self, bucket: Bucket, update: Update):
        self._names, self._entries = bucket.layout.names, bucket.layout.total
        kept, device = bucket.states.get(Residual.name), bucket.layout.device
        found = torch.zeros(3, dtype=torch.float64, device=device)
        found[0] = update.flat.count_nonzero()
        self._waits = bucket.keeps_residual
        if self._waits:
            kernels.sum_squares([bucket.residual], found[1:2])
        last_sent = None if kept is None else kept.last_sent
        self._has_ages = last_sent is not None
        if last_sent is not None:
            for part in last_sent.split(PART):
                found[2] += (bucket.steps % 256 - part).clamp_(max=OLD).sum(dtype=torch.int64)  # modulo 256, as they are kept
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
