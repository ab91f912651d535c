"""Gradients that break things: what tests draw from."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

KINDS = ("normal", "laplace", "heavy", "zeros", "ties", "spike", "sparse", "tiny", "huge", "constant", "rising")


def draw(kind: str, n: int, seed: int, ranks: int = 1) -> Tensor:
    """n entries of a named kind; finite, and small enough that the sum over the ranks is finite too."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, generator=generator)
    match kind:
        case "normal":
            return normal
        case "laplace":
            return torch.empty(n).exponential_(generator=generator) * normal.sign()
        case "heavy":
            return normal**7
        case "zeros":
            return torch.zeros(n)
        case "ties":
            return (2 * normal).round()
        case "spike":
            flat = torch.zeros(n)
            flat[seed % max(n, 1) : seed % max(n, 1) + 1] = -3.0
            return flat
        case "sparse":
            return torch.where(torch.rand(n, generator=generator) < 0.02, normal, torch.zeros(n))
        case "tiny":
            return normal * 1e-38  # among them subnormal numbers
        case "huge":
            return normal.sign() * (1e38 / ranks)
        case "constant":
            return torch.full((n,), 0.25)
        case "rising":
            return normal[normal.abs().argsort()]  # each is larger than all before it
    raise ValueError(kind)


# A bucket of more tiles than a launch in the emulator has warps; large entries, which one block decides on, or all; and whether
# they are equal, or differ in their last bits.
CLOSE = [(250_000, count, steps) for count in (40, 400, 40_000) for steps in (1, 1024)]


def close(n: int, count: int, steps: int) -> Tensor:
    """n small entries, and among them `count` that are 1 or up to steps - 1 units of the last place larger."""
    generator = torch.Generator().manual_seed(count)
    small, sign = 1e-3 * torch.randn(n, generator=generator), torch.randn(count, generator=generator).sign()
    large = sign * (1 + torch.randint(steps, (count,), generator=generator) * 2.0**-23)
    return small.index_copy(0, torch.randperm(n, generator=generator)[:count], large)


kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**31 - 1)
