"""The noise of a rank's own gradients under Adam and its kin, which makes the mean of the ranks' updates too short.

Such an optimizer divides by the root of its gradients' second moment, so that an update is about as long as any other. A rank
steps with the gradient of its own batch. Where that is mostly noise, the ranks' updates point apart, and their mean is shorter
than one step, by up to the root of the number of ranks; the step of an optimizer that sees the mean gradient is not. So every
few steps the ranks average some entries of their updates, and each compares the mean's length with the ranks'. The ratio
multiplies what goes into the residual.

A mean that is shorter than noise alone makes it tells that the ranks' data are not of one kind: sorted by class, for example.
Each rank's second moment then measures what others never see, and the ranks average these moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Layout, Steps
from gradcomp.core.requests import Requests, World, reduce
from gradcomp.engine.slots import Slot
from gradcomp.native.memory import HostCopy

# One entry in so many is compared, within these bounds.
ONE_IN, FEWEST, MOST = 256, 1024, 4096
# Steps from one comparison to the next in the first steps, and after these.
INTERVAL, FIRST, LATER = 8, 128, 32
# Steps after which a comparison counts: on a GPU it has reached main memory then. The intervals are multiples of it.
DELAY = 4
# The share of the sums that a comparison leaves of the earlier ones.
KEPT = 0.7
# The ranks' data are not of one kind where the ratio of squares is so many times that of noise alone. Noise makes up to 1.05,
# but more in buckets of few entries, which are not asked.
UNLIKE, TOO_FEW = 1.1, 100


class RankNoise:
    """The comparison of a rank's updates with the mean of all ranks, for one bucket.

    sums: squares of the mean's entries, and the ranks' mean of the squares of their own. Each comparison adds 1 to their sum: a
    step with a spike counts like any other. factor: the root of the second over the first. samples: of the residual before an
    update goes into it, in a step that compares. own: of this rank's update. are_unlike: the ranks' data are not of one kind.
    moments: the layers' second moments, for the next comparison; None where a layer has none yet.
    """

    def __init__(self, layout: Layout, seed: int):
        self._layout, self.seed, self._ranks = layout, seed, 0
        self.sums = torch.zeros(2, dtype=torch.float64, device=layout.device)
        self.factor, self.are_unlike = 1.0, False
        self.moments: Sequence[tuple[Slot, Tensor | None]] = ()
        self._indices: Tensor | None = None
        self.samples: Tensor | None = None
        self.own: Tensor | None = None
        self._found = HostCopy(self.sums)

    def save(self) -> list[float]:
        """Return the result of the comparisons so far."""
        return [*self.sums.tolist(), self.factor, float(self._ranks)]

    def load(self, result: Sequence[float]) -> None:
        """Continue from the result of save()."""
        self.sums = torch.tensor(result[:2], dtype=torch.float64, device=self._layout.device)
        self._ranks = int(result[3])
        self.factor = _within(result[2], self._ranks)
        self.are_unlike = self._are_unlike(result[0], result[1], self._ranks)
        self._found = HostCopy(self.sums)

    def begin(self, step: int, ranks: int, residual: Tensor) -> None:
        """Begin a step, of this number, a multiple of DELAY. In some, sample the residual before an update goes into it."""
        self.samples = self.own = None
        if ranks != self._ranks:
            self.sums, self.factor, self._ranks = torch.zeros_like(self.sums), 1.0, ranks
            self.are_unlike = False
            self._found = HostCopy(self.sums)
        interval = INTERVAL if step <= FIRST else LATER
        if step % interval == DELAY:
            self._read(ranks)
        if ranks > 1 and step > 0 and step % interval == 0:
            if self._indices is None:
                count = min(max(self._layout.total // ONE_IN, FEWEST), MOST)
                self._indices = sampled_indices(self._layout.total, count, self.seed % 2**62, self._layout.device)
            self.samples = residual.index_select(0, self._indices)

    def _read(self, ranks: int) -> None:
        of_mean, of_own = self._found.all()
        if of_mean > 0 and of_own > 0:
            self.are_unlike = self._are_unlike(of_mean, of_own, ranks)
            self.factor = _within(math.sqrt(of_own / of_mean), ranks if self.are_unlike else math.sqrt(ranks))

    def _are_unlike(self, of_mean: float, of_own: float, ranks: int) -> bool:
        return ranks > 1 and self._layout.total >= TOO_FEW and of_own > UNLIKE * ranks * of_mean

    def note(self, kept: Tensor, offered: Tensor, flag: Tensor) -> None:
        """Find the update that went into the residual: what is kept and what is offered, less what was there before.

        A rank with an update that is not finite spoils the comparison of all.
        """
        if self.samples is not None and self._indices is not None:
            now = kept.index_select(0, self._indices).add_(offered.index_select(0, self._indices))
            self.own = (now - self.samples).masked_fill_(flag != 0, math.nan)
            self.samples = None

    def compare(self, steps: Steps, world: World) -> Steps:
        """Compare with the mean of all ranks before an exchange, if this step does."""
        if (own := self.own) is not None:
            self.own = None
            squares = own.double().square().sum().float().reshape(1)
            both: Any = yield from reduce(torch.cat([own, squares]) * world.share, world.mean_of_shares)
            found = torch.stack([both[:-1].double().square().sum(), both[-1].double()])
            found /= found.sum()
            self.sums = torch.where(found.isfinite().all(), KEPT * self.sums + found, self.sums)
            self._found = HostCopy(self.sums)
            if self.are_unlike:
                moments, self.moments = self.moments, ()
                yield from _average(moments, world)
        return (yield from steps)


def _average(moments: Sequence[tuple[Slot, Tensor | None]], world: World) -> Requests[None]:
    """Average moments over the ranks."""
    own = [
        slot.flat(each) if each is not None else torch.zeros(slot.layer.size, device=slot.layer.device)
        for slot, each in moments
    ]
    mean = yield from reduce(torch.cat([each.float() for each in own]).mul_(world.share), world.mean_of_shares)
    for (slot, each), part in zip(moments, mean.split([len(flat) for flat in own]), strict=True):
        if each is not None:
            each.copy_(slot.shaped(part))


def _within(factor: float, most: float) -> float:
    """Return the nearest factor between 1 and the largest that the ranks can have."""
    return float(max(min(factor, most), 1.0))


def sampled_indices(total: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Draw about `count` of a bucket's indices, in ascending order and the same on all ranks; all if there are no more."""
    if total <= count:
        return torch.arange(total, device=device)
    drawn = torch.randint(total, (count,), generator=torch.Generator().manual_seed(seed)).sort().values
    return drawn.to(device, non_blocking=device.type != "cpu")
