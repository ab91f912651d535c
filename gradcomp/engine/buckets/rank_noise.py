"""How much longer the gradients of one rank are than the mean of all ranks, since noise averages out: for Adam's divisor.

Adam divides by the root of the mean gradient's second moment. A rank knows the second moment of its own gradients, which holds
the noise of its own batch: with P ranks, up to P times as much. Directions would be too short by the root of that. So every
few steps the ranks average some entries of their gradients, and each compares them with its own. The root of the ratio of
squares multiplies its directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradcomp.core.compressor import Layout, Steps
from gradcomp.core.requests import Requests, World, reduce
from gradcomp.engine.buckets import drawn_places
from gradcomp.native.memory import HostCopy

# One entry in so many is compared, within these bounds.
ONE_IN, FEWEST, MOST = 256, 1024, 4096
# Steps from one comparison to the next in the first steps, and after these.
INTERVAL, FIRST, LATER = 8, 128, 32
# Steps after which a comparison counts: on a GPU it has reached main memory then.
DELAY = 4
# The share of the sums that a comparison leaves of the earlier ones.
KEPT = 0.7


class RankNoise:
    """The comparison of a rank's gradients with the mean of all ranks, for one bucket.

    sums: squares of the mean's entries, and of this rank's, each over the ranks' mean second moment, and times the direction's
    square: an entry counts as far as it moves its weight. Each comparison adds 1 to their sum: a step with a spike counts like
    any other. factor: the root of this rank's sum over the mean's. of_mean: the part of the second moment that is of the mean
    gradient, as the optimizer had it, and fades; 0 once the moment is this rank's own, or is taken for it.
    """

    def __init__(self, layout: Layout, seed: int, sums: Sequence[float] = (0.0, 0.0), factor: float = 1.0, ranks: int = 0):
        self._layout, self._seed, self._ranks = layout, seed, ranks
        self.sums = torch.tensor(sums, dtype=torch.float64, device=layout.device)
        self.factor, self.of_mean = factor, 0.0
        self._places: Tensor | None = None
        self._own: Tensor | None = None
        self._velocity = self._second = self.sums
        self._found = HostCopy(self.sums)

    def save(self) -> list[float]:
        """Return what another comparison of the bucket can go on from."""
        return [*self.sums.tolist(), self.factor, float(self._ranks)]

    def going_on_from(self, saved: Sequence[float]) -> RankNoise:
        """Make a comparison that goes on from the result of save()."""
        of_mean, of_own, factor, ranks = saved
        return RankNoise(self._layout, self._seed, (of_mean, of_own), _within(factor, int(ranks)), int(ranks))

    @property
    def lengthening(self) -> float:
        """The factor that makes directions as long as those of the mean gradient."""
        return math.sqrt(self.of_mean + (1 - self.of_mean) * self.factor**2)

    def begin(self, step: int, ranks: int) -> bool:
        """Begin a step. Return whether it compares."""
        self._own = None  # of a step that was given up
        if ranks != self._ranks:
            self.sums, self.factor, self._ranks = torch.zeros_like(self.sums), 1.0, ranks
            self._found = HostCopy(self.sums)
        interval = INTERVAL if step <= FIRST else LATER
        if step % interval == DELAY:
            self._read(ranks)
        return ranks > 1 and step > 0 and step % interval == 0

    def _read(self, ranks: int) -> None:
        of_mean, of_own = self._found.all()
        if of_mean > 0 and of_own > 0:
            self.factor = _within(math.sqrt(of_own / of_mean), ranks)

    def before(self, velocity: Tensor, second: Tensor) -> None:
        """Keep some entries of the moments, before a gradient is added to them. They say how much an entry counts."""
        if self._places is None:
            self._places = self._draw()
        self._velocity, self._second = (moment.index_select(0, self._places) for moment in (velocity, second))

    def after(self, velocity: Tensor, beta1: float, flag: Tensor) -> None:
        """Find the gradient that was added. A rank with one that is not finite spoils the comparison of all."""
        assert self._places is not None
        own = (velocity.index_select(0, self._places) - beta1 * self._velocity) / (1 - beta1)
        self._own = own.masked_fill(flag != 0, math.nan)

    def compare(self, steps: Steps, world: World) -> Steps:
        """Compare with the mean of all ranks before an exchange, if after() was called in this step."""
        if self._own is not None:
            yield from self._compare(self._own, world)
        return (yield from steps)

    def _compare(self, own: Tensor, world: World) -> Requests[None]:
        self._own = None
        both = yield from reduce(torch.cat([own, self._second]) * world.share, world.mean_of_shares)
        mean, level = both.double().chunk(2)
        velocity, second = self._velocity.double(), self._second.double()
        weights = torch.where(second * level > 0, velocity.square() / (second * level), 0.0)
        found = torch.stack([(weights * each.square()).sum() for each in (mean, own.double())])
        found /= found.sum()
        self.sums = torch.where(found.isfinite().all(), KEPT * self.sums + found, self.sums)
        self._found = HostCopy(self.sums)

    def _draw(self) -> Tensor:
        n = self._layout.total
        return drawn_places.draw(n, min(max(n // ONE_IN, FEWEST), MOST), self._seed % 2**62, self._layout.device)


def _within(factor: float, ranks: int) -> float:
    """Return the nearest factor that so many ranks can have."""
    return min(max(factor, 1 / max(1, ranks)), max(1, ranks))
