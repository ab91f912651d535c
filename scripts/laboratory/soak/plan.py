"""Everything that a soak draws from its seed: known gradients, spikes, overflows and specs; and what must add up in the end."""

from __future__ import annotations

import random
from collections.abc import Sequence

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
# Powers of ten of a spike. ORQ rounds to the levels of a group: larger outliers leave too few digits to all entries of theirs.
LEAST_POWER, MOST_POWER = 3, 5

# The steps from one change of the spec to the next, of a long soak and of the shortest.
LONG, SHORT = 250, 10
# Sections of a soak between two changes of the spec, if they are shorter than LONG.
SECTIONS = 80


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
        self._overflow_window, self._spike_window = 6 * self.every // 5, max(10, self.every // 4)

    def spec(self, step: int) -> str:
        """Return the spec of a step. Every spec comes once before any comes again."""
        turn, place = divmod(step // self.every, len(SPECS))
        return self._random("specs", turn).sample(SPECS, len(SPECS))[place]

    def overflow(self, step: int) -> tuple[int, int, float] | None:
        """Return a step's overflow, if there is one: a draw of the rank, the entry, and its value, which is not finite."""
        if (draw := self._at("overflow", step, self._overflow_window)) is None:
            return None
        return draw.randrange(60), draw.randrange(ENTRIES), draw.choice([float("inf"), float("-inf"), float("nan")])

    def spike(self, step: int) -> tuple[int, list[int], float] | None:
        """Return a step's spike, if there is one: a draw of the rank, some entries, and its size, which is finite."""
        if (draw := self._at("spike", step, self._spike_window)) is None:
            return None
        entries = draw.sample(range(ENTRIES)[SPIKED], draw.randint(1, 4))
        return draw.randrange(60), entries, draw.choice([-1, 1]) * 10 ** draw.uniform(LEAST_POWER, MOST_POWER)

    def gradient(self, step: int, rank: int, ranks: int) -> Tensor:
        """Draw a rank's gradient in a step, all layers as one flat tensor."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 64 + rank)
        drawn = torch.randn(ENTRIES, generator=generator)
        if (spike := self.spike(step)) is not None and spike[0] % ranks == rank:
            drawn[spike[1]] += spike[2]
        if (overflow := self.overflow(step)) is not None and overflow[0] % ranks == rank:
            drawn[overflow[1]] = overflow[2]
        return drawn

    def _at(self, purpose: str, step: int, window: int) -> random.Random | None:
        """Draw the one step of a window in which something comes. Return the further draws if it is this step."""
        draw = self._random(purpose, step // window)
        return draw if draw.randrange(window) == step % window else None

    def _random(self, purpose: str, window: int) -> random.Random:
        return random.Random(f"{self.seed} {purpose} {window}")


def ranks_of(history: Sequence[Sequence[int]], steps: int) -> list[int]:
    """Return the number of ranks in each step. history: pairs of a step and the number of ranks from there on."""
    found = [0] * steps
    for step, ranks in history:
        found[step:] = [ranks] * (steps - step)
    return found


def known_sum(plan: Plan, ranks: Sequence[int]) -> Tensor:
    """Add up the mean gradients of all steps, in float64. ranks: of each step. No rank takes a step in which one overflows."""
    total = torch.zeros(ENTRIES, dtype=torch.float64)
    for step, count in enumerate(ranks):
        for rank in range(count) if plan.overflow(step) is None else ():
            total.add_(plan.gradient(step, rank, count).double(), alpha=1 / count)
    return total


def spike_sizes(plan: Plan, steps: int) -> Tensor:
    """Add up the sizes of all spikes, by entry: zero where none came."""
    total = torch.zeros(ENTRIES, dtype=torch.float64)
    for step in range(steps):
        if spike := plan.spike(step):
            total[spike[1]] += abs(spike[2])
    return total
