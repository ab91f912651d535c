"""The base of algorithms that round each entry to one of a few levels: their knobs and clipping."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Layout, Traits
from gradcomp.exchanges.rounded import Rounded, RoundedState, route_knob
from gradcomp.knobs import knob
from gradcomp.messages.rounding import LevelRounding, RoundingRule, rounding_error
from gradcomp.native import kernels

# The largest rounding error with which error feedback is allowed, as a share of the squares of normal entries. Below 1 the
# residual stays bounded. Between 1 and this limit it grows like a random walk, as errors without feedback do. Well above this
# limit it grows by a factor each step.
LARGEST_ERROR_FED_BACK = 1.2
# The largest rounding error with which route=auto chooses alltoall for a biased compressor: alltoall rounds the sums again.
LARGEST_ERROR_ROUNDED_TWICE = 0.8
# The largest group by which the error of one rounding is measured, for a warning.
MEASURED = 2**14

# A deviation above which entries are not clipped. Squares overflow a little above it.
LARGEST_DEVIATION = 2.0**56


def sigmas_knob(default: float) -> Any:
    """Declare the knob that clips entries."""
    return knob(default, "standard deviations from 0 at which entries are clipped; 0 = no clipping", least=0)


def levels_knob(default: int, least: int = 3) -> Any:
    """Declare the knob for the number of levels."""
    counts = [count for count in kernels.PER_WORD if count >= least]
    return knob(default, "levels of a group; higher = smaller errors, more bytes", choices=counts)


@dataclass(frozen=True)
class Quantiser(Rounded):
    """Base of compressors that send each group's levels, and for each entry the number of its level."""

    group: int = knob(2048, "entries that share levels; lower = smaller errors, more bytes", least=32, most=2**31 - 1)
    sigmas: float = sigmas_knob(0.0)
    route: str = route_knob()

    # A setting that reduces the rounding error, for an error message.
    remedy: ClassVar[str] = "sigmas=1.5"

    @property
    @abstractmethod
    def rule(self) -> RoundingRule:
        """Return the rule by which a group is rounded."""

    @property
    def traits(self) -> Traits:
        error = rounding_error(replace(self.rule, group=min(self.group, MEASURED)), self.sigmas)
        return Traits(fed_back=not self.rule.stochastic, moments=self.sigmas > 0, coarse=error >= LARGEST_ERROR_ROUNDED_TWICE)

    @property
    def unbiased(self) -> bool:
        """True if the expectation of a rounded group is the group."""
        return self.rule.stochastic and self.sigmas == 0

    def refuses(self, feedback: bool) -> str | None:
        if not feedback or (error := rounding_error(self.rule, self.sigmas)) <= LARGEST_ERROR_FED_BACK:
            return None
        alternative = " or more levels" if hasattr(self, "levels") else ""
        return (
            f"with error feedback the residual would grow without end, since rounding leaves {error:.1f} times the squares "
            f"of the entries; set {self.remedy}{alternative}"
        )

    def init(self, layout: Layout, seed: int) -> QuantisedState:
        return QuantisedState(layout, seed, self.group)

    def rounding(self, n: int) -> LevelRounding:
        if n not in self._roundings:
            self._roundings[n] = LevelRounding(self.rule, n)
        return self._roundings[n]

    @functools.cached_property
    def _roundings(self) -> dict[int, LevelRounding]:
        return {}

    @property
    def may_round_twice(self) -> bool:
        """A second rounding would stop the residual from shrinking if one rounding hardly shrinks it."""
        return self.unbiased or rounding_error(self.rule, self.sigmas) < LARGEST_ERROR_ROUNDED_TWICE

    def bounds(self, acc: Acc, state: QuantisedState) -> Tensor | None:
        """Return each group's clipping bounds, from the largest deviation of its layers."""
        if not self.sigmas:
            return None
        assert acc.moments is not None
        of_layers = (acc.moments[:, 1] / state.sizes).clamp(min=0).sqrt().float()
        deviations = torch.zeros(state.groups, device=acc.residual.device)
        deviations.scatter_reduce_(0, state.overlap_groups, of_layers[state.overlap_layers], "amax")
        return self._clip(deviations)

    def bounds_of_sums(self, sums: Tensor, state: QuantisedState) -> Tensor | None:
        return self._clip(state.deviations(sums)) if self.sigmas else None  # the layers' deviations are not the sums'

    def _clip(self, deviations: Tensor) -> Tensor:
        """Return the bounds -limit and limit for each group.

        There are none where entries are so large that squares overflow, and where all are equal: those would be clipped to 0.
        """
        sound = (deviations > 0) & (deviations < LARGEST_DEVIATION)
        limit = torch.where(sound, self.sigmas * deviations, math.inf)
        return torch.stack([-limit, limit], 1).flatten()


class QuantisedState(RoundedState):
    """The state, with the layers that each group has entries of."""

    def __init__(self, layout: Layout, seed: int, group: int):
        super().__init__(seed)
        self.group = group
        self.groups = kernels.groups(layout.total, group)
        self.sizes = torch.tensor(layout.sizes, dtype=torch.float64, device=layout.device).clamp(min=1)
        overlaps = []  # pairs of a group and a layer that have entries in common
        for layer, (begin, end) in enumerate(layout.spans):
            first, last = (min(entry // group, self.groups - 1) for entry in (begin, max(end - 1, begin)))
            overlaps += [(number, layer) for number in range(first, last + 1)]
        self.overlap_groups, self.overlap_layers = torch.tensor(overlaps, device=layout.device).T.contiguous()

    def deviations(self, residual: Tensor) -> Tensor:
        """Return each group's standard deviation, for the bucket or a part of it."""
        # The last group may be longer or shorter than the others.
        begin = (kernels.groups(residual.numel(), self.group) - 1) * self.group
        last = residual[begin:].std(0, correction=0, keepdim=True)
        return torch.cat([residual[:begin].view(-1, self.group).std(1, correction=0), last]) if begin else last
