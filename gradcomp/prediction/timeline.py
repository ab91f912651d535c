"""The timeline of a step: a rank's computing, and the messages that its network carries meanwhile, in the reducer's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradcomp.core.requests import World
from gradcomp.prediction.link import Link
from gradcomp.prediction.measure import Bucket


class Work(NamedTuple):
    """The computing of a step without any exchange, in seconds.

    ready: for each layer, the share of backward after which its gradient is ready.
    """

    forward: float
    backward: float
    ready: Mapping[str, float]
    optimizer: float = 0.0


class Step(NamedTuple):
    """A step's seconds: in all, compressing and decompressing, and waiting for messages with nothing else to do."""

    seconds: float
    encoding: float
    waiting: float


def step(work: Work, buckets: Sequence[Bucket], link: Link, world: World) -> Step:
    """Lay a step out in time.

    A bucket's first message follows its last gradient. The others go round by round after backward, in bucket order. The
    network carries one message after the other.
    """
    free = now = work.forward
    done: list[float] = []
    encoding = waiting = 0.0
    filled = sorted(buckets, key=lambda bucket: _ready(work, bucket))
    for bucket in filled:
        first = bucket.parts[0]
        now = max(now, work.forward + encoding + work.backward * _ready(work, bucket)) + first.seconds
        encoding += first.seconds
        if first.message is not None:
            free = max(free, now) + link.seconds(first.message, world)
        done.append(free)
    now = max(now, work.forward + work.backward + encoding)
    for turn in range(1, max((len(bucket.parts) for bucket in buckets), default=0)):
        for i, bucket in enumerate(filled):
            if turn >= len(bucket.parts):
                continue
            waiting += max(0.0, done[i] - now)
            part = bucket.parts[turn]
            now = max(now, done[i]) + part.seconds
            encoding += part.seconds
            if part.message is not None:
                free = max(free, now) + link.seconds(part.message, world)
                done[i] = free
    return Step(now + work.optimizer, encoding, waiting)


def _ready(work: Work, bucket: Bucket) -> float:
    return max(work.ready[name] for name in bucket.names)
