"""The verdict of a record: would the steps since the last record have been shorter without compression?"""

from __future__ import annotations

import math
from typing import NamedTuple

from gradcomp.engine.steps.step_clock import Seconds
from gradcomp.watching.link import Link

# The bytes of a bucket of DistributedDataParallel, whose exchanges overlap with backward.
BUCKET = 25e6


class Verdict(NamedTuple):
    """seconds: of a step with dense exchanges, estimated. faster: whether that is less than the steps took."""

    seconds: float
    faster: bool


def judge(seconds: Seconds, link: Link, size: int) -> Verdict | None:
    """Estimate a dense step from what the steps took and from the link. size: the bytes of all gradients.

    The time of a dense exchange is hidden behind backward, but for that of the last bucket.
    """
    if not seconds.steps:
        return None
    step = seconds.by_step()
    buckets = max(1, math.ceil(size / BUCKET))
    exchange = link.seconds(size, buckets)
    last = link.seconds(min(size, int(BUCKET)), 1)
    backward = step["backward"] - step["backward_encoding"]
    computing = step["total"] - step["exposed"] - step["backward_encoding"]
    dense = computing + max(last, exchange - backward * (buckets - 1) / buckets)
    return Verdict(dense, dense < step["total"])
