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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
# A bias of a moment that no float shows.
UNBIASED = 2.0**-26
# The share of the sums that a comparison leaves of the earlier ones.
KEPT = 0.7


@dataclass
class Moments:
    """Adam's moments of a bucket. They are None until there is an optimizer by Adam.

    steps: begun with the moments. late: by the numbers of layers, the steps among these that were not the layer's. idle: layers
    without the last step. refused: int32[1], not 0 where a gradient of the last step was not finite. compares: the ranks
    compare their noise in this step.
    """

    noise: RankNoise
    first: Tensor | None = None
    second: Tensor | None = None
    steps: int = 0
    late: dict[int, int] = field(default_factory=dict)
    idle: Collection[int] = ()
    refused: Tensor | None = None
    compares: bool = False

    def end_step(self, *, looks: bool) -> None:
        """End the last step. looks: look whether it was refused, and does not count. This waits for the device."""
        if looks and self.refused is not None and self.steps and int(self.refused):
            self.steps -= 1
        else:
            for layer in self.idle:
                self.late[layer] = self.late.get(layer, 0) + 1
        self.idle, self.refused = (), None

    def steps_of(self, layer: int) -> int:
        """Return the steps of a layer that have ended."""
        return max(0, self.steps - self.late.get(layer, 0))

    def steps_seen(self, layout: Layout) -> list[int]:
        """Return the steps that each layer's moments have seen, without the last one if it was refused. This may wait."""
        ended = replace(self, late=dict(self.late))
        ended.end_step(looks=True)
        return [ended.steps_of(layer) for layer in range(len(layout.names))]

    def set_steps(self, of_layers: Sequence[int]) -> None:
        """Set the steps that each layer's moments have seen."""
        self.steps, self.idle, self.refused = max(of_layers, default=0), (), None
        self.late = {layer: self.steps - steps for layer, steps in enumerate(of_layers) if steps < self.steps}

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
                state.first = state.second = None
                state.set_steps(())
            return
        # Also of steps that this rank has undone: others may have applied them, and all compare in the same exchange.
        begun = accumulation.step - 1 + accumulation.undone
        state.compares = adam.compares and state.noise.begin(begun, context.world.size)
        if state.second is None:  # the residual holds gradients, which may be much longer than directions
            accumulation.drop_residual()
        first, second = state.make(accumulation.layout)
        accumulation.velocity, accumulation.momentum = first, adam.betas[0]
        _begin(adam, state, accumulation.layout)
        frozen = context.frozen(accumulation.layout)
        idle = {layer for layer in accumulation.idle if layer in frozen or not state.steps_of(layer)}
        accumulation.adaptive, accumulation.others = _rules(adam, state, len(accumulation.layout.names), idle)
        state.idle = idle
        accumulation.decays = adam.decays
        if idle and adam.decays:
            accumulation.decays = {decay: _without(idle, *decayed) for decay, decayed in adam.decays.items()}
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
        steps = {"steps": dict(zip(layout.names, state.steps_seen(layout), strict=True))} if arrays else {}
        return Part({**arrays, **steps}, {"noise": state.noise.save()})

    def load(self, state: Moments, layout: Layout, shares: Shares) -> Callable[[], None]:
        """Load the mean of the shares' moments. A rank without shares of its own takes that of all ranks.

        Moments that have seen fewer steps than others' are left out: a rank that had just joined would count as one that has
        all its moments.
        """
        given = shares.own or shares.others
        steps = [_steps_of(share) for share in given]
        whole = [share for share, count in zip(given, steps, strict=True) if count == max(steps)]
        arrays = [{moment: share.arrays(moment, layout, optional=True) for moment in self.fields} for share in given]
        for share, each in zip(given, arrays, strict=True):
            _check(share, each, layout)
        parts = [each for each, count in zip(arrays, steps, strict=True) if count == max(steps)]
        noise = RankNoise(layout, state.noise.seed)
        if shares.own and whole[0].bucket is not None:
            noise.load(saved.numbers_of(whole[0].bucket, "noise", 5))
        counts = [max((_steps_of(share, [name]) for share in whole), default=0) for name in layout.names]

        def copy() -> None:
            state.noise = noise
            state.set_steps(counts)
            for moment in self.fields:
                found = [each[moment] for each in parts if each[moment]]
                if not found:  # the residual may hold gradients
                    setattr(state, moment, None)
                load_sum(state, moment, layout, found, 1 / max(1, len(found)))

        return copy

    def scale(self, state: Moments, factor: float) -> None:
        """Keep the moments, unless all is forgotten: they are no sums."""
        if factor == 0:
            state.noise.of_mean = 0.0
            state.set_steps(())
            for each in self.arrays(state):
                each.zero_()


def _check(share: Share, arrays: Mapping[str, Mapping[str, Tensor]], layout: Layout) -> None:
    """Refuse moments that do not belong together, and second moments that are no mean of squares."""
    second, damaged = arrays["second"], "it is damaged; load another one"
    if missing := sorted(second.keys() ^ arrays["first"].keys()):
        raise ValueError(f"{share.prefix}the state has only one of Adam's moments of {missing[0]!r}: {damaged}")
    counted = saved.table_or_empty(share.layers, "steps").keys() & {*layout.names}
    if missing := sorted(second.keys() ^ counted):
        raise ValueError(
            f"{share.prefix}the state has only Adam's moments, or only the count of steps, of {missing[0]!r}: {damaged}"
        )
    if not share.trusted:
        for name, each in second.items():
            if bool((each < 0).any()):
                raise ValueError(f"{share.prefix}Adam's second moment of {name!r} is negative in the state: {damaged}")


def _steps_of(share: Share, names: Sequence[str] | None = None) -> int:
    """Return the most steps that the moments of these layers have seen, by default of all layers."""
    theirs = saved.table_or_empty(share.layers, "steps")
    return max((saved.read_int(theirs, name) for name in theirs if names is None or name in names), default=0)


def _without(idle: Collection[int], layers: list[int], weights: list[Tensor]) -> tuple[list[int], list[Tensor]]:
    """Leave layers without a step out of those that decay."""
    kept = [(layer, weight) for layer, weight in zip(layers, weights, strict=True) if layer not in idle]
    return [layer for layer, _ in kept], [weight for _, weight in kept]


def _begin(adam: AdamStep, state: Moments, layout: Layout) -> None:
    """Begin a step: count the last one, and take the seeds over."""
    state.end_step(looks=adam.skipped)
    if adam.seeds is None:
        return
    counts = [state.steps_of(layer) for layer in range(len(layout.names))]
    firsts, seconds = (moment.split(layout.sizes) for moment in state.make(layout))
    for layer, (first, second, seed) in enumerate(zip(firsts, seconds, adam.seeds, strict=True)):
        if seed is not None:
            first.copy_(seed[0])
            second.copy_(seed[1])
            counts[layer], state.noise.of_mean = adam.steps[layer], 1.0
    state.set_steps(counts)


def _rules(
    adam: AdamStep, state: Moments, layers: int, idle: Collection[int]
) -> tuple[kernels.Adaptive, dict[int, kernels.Adaptive]]:
    """Count a step, and return the rule by which a gradient becomes a direction, and others from some layers on.

    A layer that began later than the others of its bucket has another correction of its moments' bias, until both are 1.
    """
    weight = 1 - adam.betas[1] ** state.steps  # of all gradients that the second moment has seen
    state.steps += 1
    state.noise.of_mean *= adam.betas[1] * weight / (1 - adam.betas[1] ** state.steps)
    share = adam.share * state.noise.lengthening
    slowest = max(adam.betas[0], adam.betas[1])
    enough = math.ceil(math.log(UNBIASED) / math.log(slowest)) if slowest else 1

    def rule(steps: int) -> kernels.Adaptive:
        first, root_scale = share / (1 - adam.betas[0] ** steps), 1 / math.sqrt(1 - adam.betas[1] ** steps)
        assert state.second is not None
        return kernels.Adaptive(
            state.second, 1 - adam.betas[0], 0.0, first, adam.betas[1], 1 - adam.betas[1], root_scale, adam.epsilon, share
        )

    counts = {layer: min(state.steps - late, enough) for layer, late in state.late.items() if layer not in idle}
    if all(count == min(state.steps, enough) for count in counts.values()):
        return rule(state.steps), {}
    counts = {layer: counts.get(layer, state.steps) for layer in range(layers) if layer not in idle}
    rules, last = {}, None
    for layer, count in counts.items():
        if min(count, enough) != last:
            rules[layer], last = rule(count), min(count, enough)
    first = rules.pop(min(rules))
    return first, rules


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
