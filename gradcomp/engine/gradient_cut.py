"""The cut of this rank's own gradients to the norms of the user's clips, before anything of them stays."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from gradcomp.engine.bucket import Bucket
from gradcomp.engine.context import StepContext
from gradcomp.engine.optimizer_steps import views_beside
from gradcomp.engine.optimizer_view import OptimizerView
from gradcomp.engine.stages.stage import cut_factors, squares_of, tensor_on
from gradcomp.engine.user_clip import UserClip
from gradcomp.native.memory import Memory
from gradcomp.networks import Network


class GradientCut:
    """The cut of a model's gradients on this rank. memory: the lender of scratch."""

    def __init__(self, view: OptimizerView, network: Network, memory: Memory):
        self._view, self._network, self._memory = view, network, memory
        self._kept: tuple[list[Collection[str]], Tensor, bool] | None = None

    def cut(self, buckets: Sequence[Bucket], context: StepContext) -> None:
        """Note the factors of all gradients, which are complete. One clip may be of several optimizers, or models."""
        squares = [
            # A layer with an entry that is not finite has no norm. Its finite entries go to the residual.
            squares_of(each.ordered_grads, context.loss_scale(each.layout.device), self._memory).nan_to_num_(0.0, 0.0, 0.0)
            for each in buckets
        ]
        device, counts, known = squares[0].device, [each.count for each in buckets], self._view.bounds()
        flat = torch.cat([each.to(device) for each in squares])
        number_of, has_others = self._numbers(buckets, [names for _, names in known], device)
        share, beside = self._network.world.size if self._view.sums else 1, views_beside(self._view)
        if len(known) == 1 and not (has_others or beside):
            clip, total = known[0][0], flat.sum()
            clip.squares, clip.whole = total, 0.0
            factor = cut_factors((clip.bound or 0.0) / share, total.sqrt())
            context.cuts |= {each.layout.names[0]: factor.to(each.layout.device).expand(each.count) for each in buckets}
            return
        sums = flat.new_zeros(len(known) + 1).index_add_(0, number_of, flat).unbind()
        for (clip, _), total in zip(known, sums, strict=False):
            clip.squares, clip.whole = total, 0.0
        bounds, totals = [], []  # type: list[float], list[Tensor]
        place_of: dict[int, int] = {}
        for group in joined([clip for clip, _ in known], [clip for view in beside for clip, _ in view.bounds()]):
            place_of |= {id(each): len(bounds) for each in group}
            bounds.append(math.hypot(*[each.bound or 0.0 for each in group]) / share)
            totals.append(torch.stack([each.squares.to(device) for each in group if each.squares is not None]).sum())
        places = [place_of[id(clip)] for clip, _ in known]
        # The last ones are those of layers without a clip.
        factors = cut_factors(tensor_on(device, [*bounds, math.inf]), torch.stack([*totals, flat.new_zeros(())]).sqrt())
        if places != [*range(len(places))]:
            factors = factors[tensor_on(device, [*places, len(bounds)])]
        cuts = factors[number_of].split(counts)
        context.cuts |= {each.layout.names[0]: cut.to(each.layout.device) for each, cut in zip(buckets, cuts, strict=True)}
        if has_others:  # a clip may begin there, and the gradients of others are not too long
            for bucket, own, number in zip(buckets, squares, number_of.split(counts), strict=True):
                bucket.squares = torch.where(number.to(own.device) == len(known), own, 0.0)

    def _numbers(self, buckets: Sequence[Bucket], clips: list[Collection[str]], device: torch.device) -> tuple[Tensor, bool]:
        """Return the number of each layer's clip, or of clips where it has none, and whether some have none."""
        if self._kept is None or len(self._kept[0]) != len(clips) or not all(map(operator.is_, self._kept[0], clips)):
            number_of = {name: number for number, names in enumerate(clips) for name in names}
            numbers = [number_of.get(name, len(clips)) for bucket in buckets for name in bucket.layout.names]
            self._kept = clips, tensor_on(device, numbers), len(clips) in numbers
        return self._kept[1:]


def joined(own: Sequence[UserClip], others: Sequence[UserClip]) -> list[list[UserClip]]:
    """Return the clips together that are one, if one of them is of this model. The first of several says so for all."""
    groups: list[list[UserClip]] = []
    for clip in sorted([*own, *others], key=lambda each: each.factor):
        if groups and clip.acts_with(groups[-1][-1]):
            groups[-1].append(clip)
        else:
            groups.append([clip])
    mine = {id(each) for each in own}
    groups = [group for group in groups if not mine.isdisjoint(map(id, group))]
    for group in groups:
        if len(group) > 1:
            whole, speaker = math.hypot(*[each.bound or 0.0 for each in group]), min(group, key=lambda each: each.noted)
            for each in group:
                each.whole = whole
                each.family.has_said |= each.family is not speaker.family
    return groups
