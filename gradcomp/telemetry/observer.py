"""The observer of one rank's steps: it checks the replicas, and makes records for the user's writers."""

from __future__ import annotations

import copy
import math
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradcomp.aliases import GradcompWarning
from gradcomp.engine.bucket import Bucket
from gradcomp.engine.clock import Seconds, StepClock
from gradcomp.engine.context import Traffic
from gradcomp.engine.digests import differences, digests
from gradcomp.engine.reducer import Reducer
from gradcomp.engine.session import Session
from gradcomp.native import kernels
from gradcomp.native.memory import HostCopy, Update
from gradcomp.networks import gather

_DIVERGED = (
    "the replicas have diverged: before the optimizer's step {step}, {parted}. Start all ranks from a state before that, and "
    "look for a change of weights on some ranks only: weights not broadcast at the start, another learning rate, a step that "
    "one rank leaves out, a failing memory"
)

# A record: names, and figures that JSON knows.
Record = dict[str, Any]
Writer = Callable[[Record], object]


@dataclass(frozen=True)
class Intervals:
    """Steps from one record to the next, and from one check of the replicas to the next; 0 = none."""

    record: int = 50
    check: int = 1000

    def __str__(self) -> str:
        return f"a check of the replicas every {self.check} steps"


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
        self._figures: dict[int, Callable[[], dict[str, Any]]] = {}
        self._asked: list[Callable[[], None]] = []
        self._late: list[Callable[[], None]] = []
        self._sent, self._counted, self._counted_spec = Traffic(), 0, ""  # since the last record
        self._ahead: weakref.WeakKeyDictionary[Bucket, int] = weakref.WeakKeyDictionary()  # the step when a bucket's began
        self._clock: StepClock | None = None
        self._until_last = Seconds()

    def __str__(self) -> str:
        """Describe the joint acts of the observers of all ranks."""
        weights = self._weights
        return str(self.intervals) if weights is None else f"{self.intervals}, of {len(weights)} weights: {', '.join(weights)}"

    def delivered(self, bucket: Bucket, update: Update) -> None:
        """Look at a bucket's mean update. Of several optimizers, each one's buckets have steps of their own."""
        step = bucket.steps + self._ahead.setdefault(bucket, self._watched.reducer.steps_done + 1 - bucket.steps)
        if self._writers and self.intervals.record and step % self.intervals.record == 0:
            self._figures[bucket.index] = figures_of(bucket, update)

    def discard(self) -> None:
        """Forget a step that will not end."""
        self._figures.clear()
        self._asked.clear()

    def step_done(self, reducer: Reducer) -> None:
        """Look at a step that has ended, and begin requests, the same on all ranks."""
        late, self._late = self._late, []
        for each in late:
            each()
        if (spec := self._watched.spec) != self._counted_spec:  # a record tells of one spec
            self._counted_spec, self._sent, self._counted = spec, Traffic(), 0
        self._sent.sent += reducer.traffic.sent
        self._sent.between_hosts += reducer.traffic.between_hosts
        self._sent.dense += reducer.bytes_dense
        self._counted += 1
        step, network, weights = reducer.steps_done, reducer.network, self._weights
        if weights is not None and self.intervals.check and step % self.intervals.check == 0:
            own = digests(weights, counts=not self._watched.updates.lags)
            found = gather(network, own, "telemetry's check of the replicas")
            self._asked.append(lambda: self._check([*weights], found, step))
        if self._figures:
            self._asked.append(lambda: self._record(reducer, step))

    def conclude(self) -> None:
        """Wait for the replies to the requests of step_done()."""
        asked, self._asked = self._asked, []
        for each in asked:
            each()

    def _check(self, names: Sequence[str], answer: Callable[[], list[Tensor]], step: int) -> None:
        every = answer()
        found = [HostCopy(each) for each in every]
        number = self._watched.network.world.number

        def read() -> None:
            parted = differences(names, {number(rank): [int(x) for x in own.all()] for rank, own in enumerate(found)})
            if parted:
                raise RuntimeError(_DIVERGED.format(step=step, parted=parted))

        self._read(read, every[0])

    def _record(self, reducer: Reducer, step: int) -> None:
        figures, self._figures = self._figures, {}
        world = reducer.network.world
        record: Record = {"step": step, "time": time.time(), "rank": world.number(world.rank), "spec": self._watched.spec}
        counted, total = max(1, self._counted), self._sent
        record |= {
            "bytes_sent": total.sent / counted,
            "bytes_between_hosts": total.between_hosts / counted,
            "compression": total.dense / total.sent if total.sent else None,
        }
        self._sent, self._counted = Traffic(), 0
        assert reducer.clock is not None  # since this observer watches
        if reducer.clock is not self._clock:  # a change of spec makes a new one
            self._clock, self._until_last = reducer.clock, Seconds()
        now = replace(reducer.clock.seconds)
        seconds, self._until_last = now.less(self._until_last), now
        record["seconds"] = seconds.by_step() if seconds.steps else None
        health = {bucket.index: bucket.health for bucket in reducer.buckets if bucket.health is not None}

        def write() -> None:
            buckets = [figures[index]() for index in sorted(figures)]
            for own, index in zip(buckets, sorted(figures), strict=True):
                if index in health:
                    own |= health[index].figures
            entries = sum(own["entries"] for own in buckets)
            record["density"] = sum(own["density"] * own["entries"] for own in buckets) / max(1, entries)
            record["residual"] = math.sqrt(sum(own["residual"] ** 2 for own in buckets))
            record["warnings"] = [own.warning for own in health.values() if own.warning]
            record["buckets"] = buckets
            self._writers = [writer for writer in self._writers if _takes(writer, record)]

        self._read(write, reducer.buckets[0].flat)

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
        text = f"the telemetry's writer {writer!r} gets no more records, since it failed: {error!r}"
        warnings.warn(text, GradcompWarning, stacklevel=2)
        return False
    return True


def figures_of(bucket: Bucket, update: Update) -> Callable[[], dict[str, Any]]:
    """Begin to copy the figures of a bucket after a step to main memory. Return a function that reads them.

    age: mean steps since an entry was last sent; more than 255 count as 255.
    """
    progress, layout = bucket.progress, bucket.layout
    found = torch.zeros(3, dtype=torch.float64, device=layout.device)
    found[0] = update.flat.count_nonzero()
    if progress is not None:
        kernels.sum_squares([progress.residual + progress.start], found[1:2])
    ages = None if progress is None else progress.ages
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
