"""gTop-k: every rank's largest entries meet pairwise in a tree, and each meeting lets only the k largest sums go on.

S. Shi, Q. Wang, K. Zhao, Z. Tang, Y. Wang, X. Huang, X. Chu, "A Distributed Synchronous SGD Algorithm with Global Top-k
Sparsification for Low Bandwidth Networks" (ICDCS 2019). A partial sum that a meeting drops is lost in the published form if the
same entry comes to the root on another way: its senders see that entry in the result and do not take theirs back. Here the
rank that dropped it keeps it then. faithful=true is the published form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp import kernels, paths, wire
from gradcomp.core import Acc, Compressor, Payload, Steps, World


@dataclass(frozen=True)
class GTopK(Compressor):
    """k = max(1, ceil(ratio * n)) of the model's n entries come out of the tree."""

    ratio: float = 0.001  # lower = fewer bytes, staler gradients
    faithful: bool = False  # the published form, which loses what an inner rank drops

    def __post_init__(self) -> None:
        paths.check_ratio("gtopk", self.ratio)

    @property
    def whole_model(self) -> bool:
        return True

    @property
    def sparse(self) -> bool:
        return True

    def eased(self, progress: float) -> GTopK:
        return replace(self, ratio=self.ratio**progress)

    def exchange(self, acc: Acc, state: None, world: World) -> Steps:
        n = acc.value.numel()
        own = wire.empty(wire.sparse_form(paths.count_of(self.ratio, n)), acc.value.device)
        kernels.take_topk(acc.value, **own.arrays, k=len(own["values"]), flag=acc.flag, peaks=acc.peaks)
        dropped: list[Entries] = []

        def join(ours: Payload, theirs: Payload) -> Payload:
            met, left = meet(ours, theirs)
            dropped.append(left)
            return met

        result = yield from paths.up_the_tree(own, world, join)
        result = yield from paths.down_the_tree(result, world)
        update = kernels.sparse_zeros(n, acc.value.device)
        kernels.add_sparse(update, **result.arrays, scale=1 / world.size)
        self._settle(acc, own, [] if self.faithful else dropped, result, update)
        return update

    def _settle(self, acc: Acc, own: Payload, dropped: list[Entries], result: Payload, update: Tensor) -> None:
        """What is not in the result goes back; so does what was dropped of an entry that is."""
        failed = ~update[:1].isfinite()
        went = is_in(own["indices"], result["indices"]) & ~failed
        places = own["indices"].long()
        acc.value.index_add_(0, places, own["values"].masked_fill(went, 0.0))
        if acc.velocity is not None:
            acc.velocity.index_copy_(0, places, acc.velocity.index_select(0, places).masked_fill(went, 0.0))
        for values, indices in dropped:
            lost = is_in(indices, result["indices"]) & ~failed
            acc.value.index_add_(0, indices.long(), values.masked_fill(~lost, 0.0))


class Entries(NamedTuple):
    """Values and their places, in order; a place may come twice, with a value of 0."""

    values: Tensor
    indices: Tensor


def meet(ours: Payload, theirs: Payload) -> tuple[Payload, Entries]:
    """The k largest of the sums, ties to the lower place, and the sums that are left."""
    k = len(ours["values"])
    indices, order = torch.cat([ours["indices"], theirs["indices"]]).sort(stable=True)
    values = torch.cat([ours["values"], theirs["values"]]).index_select(0, order)
    again = torch.zeros_like(indices, dtype=torch.bool)
    again[1:] = indices[1:] == indices[:-1]  # a place comes twice at most
    sums = values.masked_fill(again, 0.0)
    sums[:-1] += values[1:].masked_fill(~again[1:], 0.0)
    # What is compared: a magnitude's bits plus one, so that only what came again counts nothing.
    rank = ((sums.view(torch.int32) & 0x7FFFFFFF) + 1).masked_fill(again, 0).view(torch.float32)
    met = wire.empty(ours.form, indices.device)
    places = torch.empty(k, dtype=torch.int32, device=indices.device)
    kernels.take_topk(rank, k, torch.empty_like(met["values"]), places, met["header"])
    torch.index_select(indices, 0, places, out=met["indices"])
    torch.index_select(sums, 0, places, out=met["values"])
    met["header"][1:] = torch.maximum(ours["header"][1:], theirs["header"][1:])
    return met, Entries(sums.masked_fill(rank.view(torch.int32) == 0, 0.0), indices)


def is_in(places: Tensor, chosen: Tensor) -> Tensor:
    """Whether each place is among the chosen ones, which are in order."""
    at = torch.searchsorted(chosen, places).clamp_(max=len(chosen) - 1)
    return chosen.index_select(0, at) == places
