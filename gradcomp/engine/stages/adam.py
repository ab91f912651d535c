"""Adam's moments, kept by each rank of its own gradients. Directions go into the residual, and the ranks exchange them.

Adam divides by the root of the second moment. A sparse exchange delivers an entry's gradients of many steps at once; to Adam
that looks like one large gradient, and the entry moves hardly further than by one step's. So each rank makes Adam's direction
of its own gradient in every step. The unsent part of it stays in the residual, and the mean of the sent parts moves the weights
by the rate.

The residual of an unsent entry sums directions up, as the first moment does. The two together would delay it twice; so an entry
of the residual has its gradient in place of the first moment. With everything sent, each step is Adam's.

Adam divides by the root of the mean gradient's second moment. A rank knows the second moment of its own gradients, which holds
the noise of its own batch: with P ranks, up to P times as much. Directions would be too short by the root of that. So every
few steps the ranks average some entries of their gradients, and each compares them with its own. The root of the ratio of
squares multiplies its directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.core.compressor import Layout, Steps
from gradcomp.core.requests import World, reduce
from gradcomp.engine.context import AdamStep, StepContext
from gradcomp.engine.stages.stage import Accumulation, Copy, Part, Share, Shares, Stage, load_sum
from gradcomp.native import kernels
from gradcomp.native.memory import HostCopy

# One entry in so many is compared, within these bounds.
ONE_IN, FEWEST, MOST = 256, 1024, 4096
# Steps from one comparison to the next in the first steps, and after these.
INTERVAL, FIRST, LATER = 8, 128, 32
# Steps after which a comparison counts: on a GPU it has reached main memory then.
DELAY = 4
# The share of the sums that a comparison leaves of the earlier ones.
KEPT = 0.7


@dataclass
class Moments:
    """Adam's moments of a bucket. They are None until there is an optimizer by Adam.

    steps: begun with the moments. refused: int32[1], not 0 where a gradient of the last step was not finite.
    compares: the ranks compare their noise in this step.
    """

    noise: RankNoise
    first: Tensor | None = None
    second: Tensor | None = None
    steps: int = 0
    refused: Tensor | None = None
    compares: bool = False

    def steps_seen(self) -> int:
        """Return the steps that the moments have seen, without the last one if it was refused. This waits for the device."""
        return self.steps if self.refused is None else max(0, self.steps - int(self.refused))

    def for_optimizer(self) -> dict[str, Tensor]:
        """Return the moments, the second as of the mean gradient, which an optimizer sees once it has them back.

        A rank's second moment holds the noise of its own gradients. It would make all steps shorter.
        """
        if self.first is None or self.second is None:
            return {}
        return {"first": self.first, "second": self.second / self.noise.lengthening**2}

    def make(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return the moments. Make them of zeros if there are none."""
        if self.first is None or self.second is None:
            self.first, self.second = (torch.zeros(layout.total, device=layout.device) for _ in range(2))
        return self.first, self.second


class Adam(Stage):
    """Makes directions where the optimizer is Adam or AdamW, and the exchange has taken its moments over."""

    name: ClassVar[str] = "adam"
    fields: ClassVar[tuple[str, ...]] = ("first", "second")

    def init(self, layout: Layout, seed: int) -> Moments:
        return Moments(RankNoise(layout, seed))

    def prepare(self, accumulation: Accumulation, state: Moments, context: StepContext) -> None:
        adam, state.compares = context.momentum(accumulation.layout), False
        if not isinstance(adam, AdamStep):
            if state.second is not None:  # the residual holds directions, which are no gradients
                accumulation.drop_residual()
                state.first, state.second, state.steps, state.refused = None, None, 0, None
            return
        state.compares = adam.compares and state.noise.begin(accumulation.step - 1, context.ranks)
        if state.second is None:  # the residual holds gradients, which may be much longer than directions
            accumulation.drop_residual()
        first, second = state.make(accumulation.layout)
        accumulation.velocity, accumulation.momentum = first, adam.beta1
        accumulation.adaptive = _rule(adam, state, accumulation.layout)
        state.refused = accumulation.flag
        if state.compares:
            state.noise.before(first, second)

    def after(self, accumulation: Accumulation, state: Moments, context: StepContext) -> None:
        if state.compares and state.first is not None:
            state.noise.after(state.first, accumulation.momentum, accumulation.flag)

    def around(self, steps: Steps, accumulation: Accumulation, state: Moments, world: World) -> Steps:
        return state.noise.compare(steps, world) if state.compares else steps

    def save(self, state: Moments, layout: Layout, copy: Copy) -> Part:
        arrays = super().save(state, layout, copy).layers
        steps = {"steps": dict.fromkeys(layout.names, state.steps_seen())} if arrays else {}
        return Part({**arrays, **steps}, {"noise": state.noise.save()})

    def load(self, state: Moments, layout: Layout, shares: Shares) -> Callable[[], None]:
        """Load the mean of the shares' moments. A rank without shares of its own takes that of all ranks.

        Moments that have seen fewer steps than others' are left out: a rank that had just joined would count as one that has
        all its moments.
        """
        given = shares.own or shares.others
        steps = [_steps_of(share) for share in given]
        whole = [share for share, count in zip(given, steps, strict=True) if count == max(steps)]
        arrays = [{field: share.arrays(field, layout, optional=True) for field in self.fields} for share in given]
        for each in arrays:
            if missing := sorted(each["second"].keys() ^ each["first"].keys()):
                raise ValueError(f"the state has only one of Adam's moments of {missing[0]!r}: it is damaged; load another one")
        parts = [each for each, count in zip(arrays, steps, strict=True) if count == max(steps)]
        noise = RankNoise(layout, state.noise.seed)
        if shares.own and whole[0].bucket is not None:
            noise.load(saved.numbers_of(whole[0].bucket, "noise", 5))
        count = max((_steps_of(share, layout.names) for share in whole), default=0)

        def copy() -> None:
            state.steps, state.refused, state.noise = count, None, noise
            for field in self.fields:
                found = [each[field] for each in parts if each[field]]
                load_sum(state, field, layout, found, 1 / max(1, len(found)))

        return copy

    def scale(self, state: Moments, factor: float) -> None:
        """Keep the moments, unless all is forgotten: they are no sums."""
        if factor == 0:
            state.steps, state.noise.of_mean = 0, 0.0
            for each in self.arrays(state):
                each.zero_()


def _steps_of(share: Share, names: Sequence[str] | None = None) -> int:
    """Return the most steps that the moments of these layers have seen, by default of all layers."""
    theirs = saved.table_or_empty(share.layers, "steps")
    return max((saved.read_int(theirs, name) for name in theirs if names is None or name in names), default=0)


def _rule(adam: AdamStep, state: Moments, layout: Layout) -> kernels.Adaptive:
    """Begin a step with the moments, and return the rule by which a gradient becomes a direction."""
    first, second = state.make(layout)
    if adam.skipped:
        state.steps = state.steps_seen()
    if adam.seeds is not None:
        firsts, seconds = first.split(layout.sizes), second.split(layout.sizes)
        for own_first, own_second, seed in zip(firsts, seconds, adam.seeds, strict=True):
            if seed is not None:
                own_first.copy_(seed[0])
                own_second.copy_(seed[1])
                state.steps, state.noise.of_mean = adam.steps, 1.0
    weight = 1 - adam.beta2**state.steps  # of all gradients that the second moment has seen
    state.steps += 1
    state.noise.of_mean *= adam.beta2 * weight / (1 - adam.beta2**state.steps)
    root_scale = 1 / math.sqrt(1 - adam.beta2**state.steps)
    share = adam.share * state.noise.lengthening
    of_first = share / (1 - adam.beta1**state.steps)
    return kernels.Adaptive(second, 1 - adam.beta1, 0.0, of_first, adam.beta2, 1 - adam.beta2, root_scale, adam.epsilon, share)


class RankNoise:
    """The comparison of a rank's gradients with the mean of all ranks, for one bucket.

    sums: squares of the mean's entries, and of this rank's, each over the ranks' mean second moment, and times the direction's
    square: an entry counts as far as it moves its weight. Each comparison adds 1 to their sum: a step with a spike counts like
    any other. factor: the root of this rank's sum over the mean's. of_mean: the part of the second moment that is of the mean
    gradient, as the optimizer had it, and fades; 0 once the moment is this rank's own, or is taken for it.
    """

    def __init__(self, layout: Layout, seed: int):
        self._layout, self.seed, self._ranks = layout, seed, 0
        self.sums = torch.zeros(2, dtype=torch.float64, device=layout.device)
        self.factor, self.of_mean = 1.0, 0.0
        self._indices: Tensor | None = None
        self._own: Tensor | None = None
        self._first = self._second = self.sums
        self._found = HostCopy(self.sums)

    def save(self) -> list[float]:
        """Return the result of the comparisons so far."""
        return [*self.sums.tolist(), self.factor, float(self._ranks), self.of_mean]

    def load(self, result: Sequence[float]) -> None:
        """Continue from the result of save()."""
        self.sums = torch.tensor(result[:2], dtype=torch.float64, device=self._layout.device)
        self._ranks = int(result[3])
        self.factor, self.of_mean = _within(result[2], self._ranks), min(result[4], 1.0)
        self._found = HostCopy(self.sums)

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

    def before(self, first: Tensor, second: Tensor) -> None:
        """Sample the moments before a gradient is added to them. They say how much an entry counts."""
        if self._indices is None:
            total = self._layout.total
            count = min(max(total // ONE_IN, FEWEST), MOST)
            self._indices = sampled_indices(total, count, self.seed % 2**62, self._layout.device)
        self._first, self._second = (moment.index_select(0, self._indices) for moment in (first, second))

    def after(self, first: Tensor, beta1: float, flag: Tensor) -> None:
        """Find the gradient that was added. A rank with one that is not finite spoils the comparison of all."""
        assert self._indices is not None
        own = (first.index_select(0, self._indices) - beta1 * self._first) / (1 - beta1)
        self._own = own.masked_fill(flag != 0, math.nan)

    def compare(self, steps: Steps, world: World) -> Steps:
        """Compare with the mean of all ranks before an exchange, if after() was called in this step."""
        own, self._own = self._own, None
        if own is not None:
            both = yield from reduce(torch.cat([own, self._second]) * world.share, world.mean_of_shares)
            mean, level = both.double().chunk(2)
            first, second = self._first.double(), self._second.double()
            weights = torch.where(second * level > 0, first.square() / (second * level), 0.0)
            found = torch.stack([(weights * each.square()).sum() for each in (mean, own.double())])
            found /= found.sum()
            self.sums = torch.where(found.isfinite().all(), KEPT * self.sums + found, self.sums)
            self._found = HostCopy(self.sums)
        return (yield from steps)


def _within(factor: float, ranks: int) -> float:
    """Return the nearest factor that so many ranks can have."""
    return min(max(factor, 1 / max(1, ranks)), max(1, ranks))


def sampled_indices(total: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Draw about `count` of a bucket's indices, in ascending order and the same on all ranks; all if there are no more."""
    if total <= count:
        return torch.arange(total, device=device)
    return torch.randint(total, (count,), generator=torch.Generator().manual_seed(seed)).sort().values.to(device)
