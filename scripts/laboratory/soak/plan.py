"""Everything that a soak draws from its seed: known gradients, spikes, overflows and specs; and what must add up in the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Layers of very different sizes, 61,009 entries in all. Those whose name begins with bias are exchanged whole.
SHAPES = {
    "table": (1500, 12),
    "wide": (240, 125),
    "bias_wide": (240,),
    "kernel": (24, 16, 3, 3),
    "square": (96, 96),
    "bias_square": (96,),
    "gain": (1,),
}
ENTRIES = sum(torch.Size(shape).numel() for shape in SHAPES.values())
# Several buckets.
BUCKET_MB = 0.08
RULE = "; bias*=dense:feedback=true"
SPECS = [
    f"{spec}{RULE}"
    for spec in (
        "topk:ratio=0.01",
        "topk:ratio=0.05,route=split",
        "topk:ratio=0.02,wire=exact,route=tree",
        "sdagc",
        "sdagc:lam=2,small=pool",
        "sdagc:density=0.05,scope=layer,small=dense,route=split",
        "orq:sigmas=1.5,feedback=true",
        "orq:levels=5,feedback=true,route=alltoall",
        "orq:levels=9,feedback=true",
    )
]

# Spikes hit these entries alone, all of the first layer: their float32 sums then know nothing smaller than a spike's last bit.
SPIKED = slice(7, torch.Size(SHAPES["table"]).numel(), 16)
# Powers of ten of a spike. The loss scale, which swings around 2^16, must not make the largest ones overflow.
LEAST_POWER, MOST_POWER = 3, 30
# Specs that round to the levels of a group: outliers of very different sizes in one group make levels of others' size of all
# its entries, which then keep as few digits as a spike does. Their spikes have this power at most.
ROUNDING, MOST_POWER_OF_ROUNDING = "orq", 5
# Steps until a spike's opposite comes, at most, and from there until a large one has left the residual.
MOST_UNTIL_OPPOSITE, UNTIL_SENT = 10, 30

# The steps from one change of the spec to the next, of a long soak and of the shortest.
LONG, SHORT = 250, 10
# Sections of a soak between two changes of the spec, if they are shorter than LONG.
SECTIONS = 80


class Spike(NamedTuple):
    """A finite spike in the gradient of one rank, at these entries. Its opposite comes in the step `back`."""

    step: int
    back: int
    draw: int
    entries: Sequence[int]
    size: float


class Net(nn.Module):
    """Layers that compute nothing: the gradients of its loss are the given ones."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, drawn: Tensor) -> Tensor:
        """Return the loss."""
        return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), split(drawn), strict=True)]).sum()


def split(flat: Tensor) -> list[Tensor]:
    """Cut a flat tensor of all entries into the layers."""
    parts = flat.split([torch.Size(shape).numel() for shape in SHAPES.values()])
    return [part.view(shape) for part, shape in zip(parts, SHAPES.values(), strict=True)]


def flat(parts: Sequence[Tensor]) -> Tensor:
    """Join the layers' entries."""
    return torch.cat([part.detach().reshape(-1) for part in parts])


class Plan:
    """What each step of a soak brings, whoever asks.

    every: steps from one change of the spec to the next. commits: steps from one commit, and one line of the log, to the next.
    growth: good steps until the loss scale doubles. Overflows come as often as to halve it again, on average.
    """

    def __init__(self, seed: int, steps: int):
        self.seed = seed
        self.every = min(LONG, max(SHORT, steps // SECTIONS))
        self.commits = max(5, self.every // 5)
        self.growth = 4 * self.every // 5
        self._overflow_window, self._spike_window = 6 * self.every // 5, max(MOST_UNTIL_OPPOSITE, self.every // 4)

    def spec(self, step: int) -> str:
        """Return the spec of a step. Every spec comes once before any comes again."""
        turn, place = divmod(step // self.every, len(SPECS))
        return self._random("specs", turn).sample(SPECS, len(SPECS))[place]

    def overflow(self, step: int) -> tuple[int, int, float] | None:
        """Return a step's overflow, if there is one: a draw of the rank, the entry, and its value, which is not finite."""
        window = step // self._overflow_window
        draw = self._random("overflow", window)
        at = window * self._overflow_window + draw.randrange(self._overflow_window)
        value = draw.choice([float("inf"), float("-inf"), float("nan")])
        return (draw.randrange(60), draw.randrange(ENTRIES), value) if at == step else None

    def spikes(self, step: int) -> list[tuple[Spike, float]]:
        """Return the spikes of a step, each with 1 or, where it is the opposite, -1."""
        window = step // self._spike_window
        near = [self._spike(each) for each in (window - 1, window) if each >= 0]
        return [(spike, sign) for spike in near for at, sign in ((spike.step, 1.0), (spike.back, -1.0)) if at == step]

    def gradient(self, step: int, rank: int, ranks: int) -> Tensor:
        """Draw a rank's gradient in a step, all layers as one flat tensor."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 64 + rank)
        drawn = torch.randn(ENTRIES, generator=generator)
        for spike, sign in self.spikes(step):
            if spike.draw % ranks == rank:
                drawn[list(spike.entries)] += sign * spike.size
        if (overflow := self.overflow(step)) is not None and overflow[0] % ranks == rank:
            drawn[overflow[1]] = overflow[2]
        return drawn

    def _spike(self, window: int) -> Spike:
        draw = self._random("spike", window)
        step = window * self._spike_window + draw.randrange(self._spike_window)
        entries = draw.sample(range(ENTRIES)[SPIKED], draw.randint(1, 4))
        back = step + draw.randint(1, MOST_UNTIL_OPPOSITE)
        sent = back + UNTIL_SENT
        meets_rounding = any(self.spec(each).startswith(ROUNDING) for each in (*range(step, sent, self.every), sent))
        power = draw.uniform(LEAST_POWER, MOST_POWER_OF_ROUNDING if meets_rounding else MOST_POWER)
        return Spike(step, back, draw.randrange(60), entries, draw.choice([-1, 1]) * 10**power)

    def _random(self, purpose: str, window: int) -> random.Random:
        return random.Random(f"{self.seed} {purpose} {window}")


def counted(gradient: Tensor) -> Tensor:
    """Return a gradient in float64, with zeros for entries that are not finite."""
    return gradient.double().nan_to_num_(0.0, 0.0, 0.0)


def ranks_of(history: Sequence[Sequence[int]], steps: int) -> list[int]:
    """Return the number of ranks in each step. history: pairs of a step and the number of ranks from there on."""
    found = [0] * steps
    for step, ranks in history:
        found[step:] = [ranks] * (steps - step)
    return found


def known_sum(plan: Plan, ranks: Sequence[int]) -> Tensor:
    """Add up the mean gradients of all steps, in float64. ranks: of each step."""
    total = torch.zeros(ENTRIES, dtype=torch.float64)
    for step, count in enumerate(ranks):
        for rank in range(count):
            total.add_(counted(plan.gradient(step, rank, count)), alpha=1 / count)
    return total


def spike_sizes(plan: Plan, steps: int) -> Tensor:
    """Add up the sizes of all spikes, by entry: zero where none came."""
    total = torch.zeros(ENTRIES, dtype=torch.float64)
    for step in range(steps):
        for spike, _ in plan.spikes(step):
            total[list(spike.entries)] += abs(spike.size)
    return total
