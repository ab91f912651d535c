"""The observer of one rank's steps: it compares with dense, checks the replicas, and makes records for the user's writers.

A comparison takes a sample of entries: the additions of all ranks to their residuals, and the update. Where the ranks exchange
the updates of their optimizers, these are added. They are compared, not gradients.
"""

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
from gradcomp.engine.reducer import Reducer
from gradcomp.engine.session import Session
from gradcomp.engine.stages.feedback import Residual
from gradcomp.engine.stages.health import Health
from gradcomp.engine.updates.adam_noise import sampled_indices
from gradcomp.messages import payload as payloads
from gradcomp.native import kernels
from gradcomp.native.memory import HostCopy, Update
from gradcomp.networks import Answer
from gradcomp.telemetry import replicas

# The most entries of a bucket that are compared.
ENTRIES = 4096

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


class Comparison:
    """The comparison of one step on one rank. All ranks draw the same entries."""

    def __init__(self, step: int):
        self.step = step
        self._indices: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._added: dict[int, Tensor] = {}
        self._delivered: dict[int, Tensor] = {}

    def before(self, bucket: Bucket) -> None:
        """Draw the bucket's entries. Keep their residual."""
        residual, total = bucket.residual, bucket.layout.total
        indices = sampled_indices(total, ENTRIES, bucket.seed % 2**40 + self.step, bucket.layout.device)
        self._indices[bucket.index] = indices
        self._weights[bucket.index] = torch.full_like(indices, residual.numel() / len(indices), dtype=torch.float64)
        self._added[bucket.index] = residual.index_select(0, indices)

    def collected(self, bucket: Bucket) -> None:
        """Keep the addition to the residual."""
        before, indices = self._added[bucket.index], self._indices[bucket.index]
        factor = bucket.feedback.residual_factor if bucket.feedback is not None and bucket.keeps_residual else 0.0
        now = bucket.residual.index_select(0, indices)
        if bucket.progress is not None:
            factor = bucket.feedback.decay if bucket.feedback is not None else 1.0
            now += bucket.progress.start.index_select(0, indices)
        self._added[bucket.index] = now - factor * before

    def delivered(self, bucket: Bucket, update: Update) -> None:
        """Keep the update."""
        self._delivered[bucket.index] = update.flat.index_select(0, self._indices[bucket.index])

    def joined_added(self) -> Tensor:
        """Join the additions of this rank, in the order of the buckets."""
        return _join(self._added)

    def figures(self, mean: Tensor) -> Tensor:
        """Return the cosine of the angle to dense, and the error relative to dense. mean: the mean of all ranks' additions."""
        delivered, weight, dense = _join(self._delivered).double(), _join(self._weights), mean.double()
        squares = (weight * dense.square()).sum()
        cosine = (weight * dense * delivered).sum() / (squares * (weight * delivered.square()).sum()).sqrt()
        error = ((weight * (delivered - dense).square()).sum() / squares).sqrt()
        return torch.stack([cosine, error])


def _join(arrays: dict[int, Tensor]) -> Tensor:
    """Join arrays of several devices on the first one's."""
    ordered = [arrays[index] for index in sorted(arrays)]
    return torch.cat([array.to(ordered[0].device) for array in ordered])


class Observer:
    """An observer of one rank. On a GPU, figures are read one step later, so that no step waits for the device.

    watched: a weak proxy of the session, which has the observer. weights: all parameters, by name; None where there are none.

    The reducer calls it in every step. Buckets may come in any order.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        intervals: Intervals,
        watched: Session,
        weights: Mapping[str, Tensor] | None = None,
    ):
        self.intervals, self._writers = intervals, [*writers]
        self._watched, self._weights = watched, weights
        self._comparison: Comparison | None = None
        self._figures: dict[int, Callable[[], dict[str, Any]]] = {}
        self._asked: list[Callable[[], None]] = []
        self._late: list[Callable[[], None]] = []
        self._compared: dict[str, float] = {}
        self._bytes = self._bytes_between_hosts = self._counted = 0
        self._counted_spec = ""
        self._clock: StepClock | None = None
        self._until_last = Seconds()

    def __str__(self) -> str:
        """Describe the joint acts of the observers of all ranks."""
        weights = self._weights
        return str(self.intervals) if weights is None else f"{self.intervals}, of {len(weights)} weights: {', '.join(weights)}"

    @property
    def _step(self) -> int:
        return self._watched.reducer.steps_done + 1

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self._step % interval == 0

    def before(self, bucket: Bucket) -> None:
        """Look at a bucket before its gradients are added to its residual."""
        if self._is_due(self.intervals.compare):
            if self._comparison is None or self._comparison.step != self._step:
                self._comparison = Comparison(self._step)
            self._comparison.before(bucket)

    def collected(self, bucket: Bucket) -> None:
        """Look at a bucket before its exchange."""
        if self._is_due(self.intervals.compare) and self._comparison is not None:
            self._comparison.collected(bucket)

    def delivered(self, bucket: Bucket, update: Update) -> None:
        """Look at a bucket's mean update."""
        if self._is_due(self.intervals.compare) and self._comparison is not None:
            self._comparison.delivered(bucket, update)
        if self._writers and self._is_due(self.intervals.record):
            self._figures[bucket.index] = figures_of(bucket, update)

    def discard(self) -> None:
        """Forget a step that will not end."""
        self._comparison = None
        self._figures.clear()
        self._asked.clear()

    def step_done(self, reducer: Reducer) -> None:
        """Look at a step that has ended, and begin requests, the same on all ranks."""
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
            digests = payloads.wrap(replicas.digests(weights, counts=not self._watched.lags))
            found = network.start(Gather(digests), "telemetry's check of the replicas")
            self._asked.append(lambda: self._check([*weights], found, step))
        if self._figures:
            self._asked.append(lambda: self._record(reducer, step))

    def conclude(self) -> None:
        """Wait for the replies to the requests of step_done()."""
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
        number = self._watched.network.world.number

        def read() -> None:
            replicas.check(names, {number(rank): [int(x) for x in own.all()] for rank, own in enumerate(found)}, step)

        self._read(read, replies[0]["bytes"])

    def _record(self, reducer: Reducer, step: int) -> None:
        figures, self._figures = self._figures, {}
        world = reducer.network.world
        record: Record = {"step": step, "time": time.time(), "rank": world.number(world.rank), "spec": self._watched.spec}
        counted = max(1, self._counted)
        dense = reducer.bytes_dense
        sent = self._bytes / counted
        record |= {
            "bytes_sent": sent,
            "bytes_between_hosts": self._bytes_between_hosts / counted,
            "compression": dense / sent if sent else None,
        }
        self._bytes = self._bytes_between_hosts = self._counted = 0
        assert reducer.clock is not None  # since this observer watches
        if reducer.clock is not self._clock:  # a change of spec makes a new one
            self._clock, self._until_last = reducer.clock, Seconds()
        now = replace(reducer.clock.seconds)
        seconds, self._until_last = now.less(self._until_last), now
        record["seconds"] = seconds.by_step() if seconds.steps else None
        health = {bucket.index: bucket.states[Health.name] for bucket in reducer.buckets if Health.name in bucket.states}

        def write() -> None:
            buckets = [figures[index]() for index in sorted(figures)]
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


def figures_of(bucket: Bucket, update: Update) -> Callable[[], dict[str, Any]]:
    """Begin to copy the figures of a bucket after a step to main memory. Return a function that reads them.

    age: mean steps since an entry was last sent; more than 255 count as 255.
    """
    kept, layout = bucket.states.get(Residual.name), bucket.layout
    found = torch.zeros(3, dtype=torch.float64, device=layout.device)
    found[0] = update.flat.count_nonzero()
    if bucket.keeps_residual:
        residual = bucket.residual if bucket.progress is None else bucket.residual + bucket.progress.start
        kernels.sum_squares([residual], found[1:2])
    ages = None if kept is None else kept.ages
    if ages is not None:
        found[2] = ages.sum(dtype=torch.int64)
    copied = HostCopy(found)

    def read() -> dict[str, Any]:
        nonzero, squares, total = copied.all()
        figures = {
            "layers": [*layout.names],
            "entries": layout.total,
            "density": nonzero / layout.total,
            "residual": squares**0.5,
        }
        return figures if ages is None else {**figures, "age": total / layout.total}

    return read
