"""How a model's layers are cut into buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from gradcomp.engine.feedback import Plain, Source, complete
from gradcomp.protocol import Compressor, Layer, Layout


class Plan(NamedTuple):
    """A bucket to be: what drives its compressor, and what it is made of."""

    source: Source
    layout: Layout


def plan(layers: Mapping[str, Layer], bucket_mb: float, compressor: Compressor) -> list[Plan]:
    """Cut the layers into buckets of one compressor each, last layer first, since backward reaches it first.

    bucket_mb: the most that a bucket has, in 10^6 bytes of float32, unless it has one layer or its compressor wants the whole
    model. Empty layers are left out.
    """
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb} must be above 0")
    buckets: list[tuple[Compressor, list[str]]] = []
    open_for: dict[tuple[Compressor, torch.device], int] = {}
    filled: dict[int, float] = {}
    for name in reversed(list(layers)):
        layer = layers[name]
        if layer.size == 0:
            continue
        chosen = compressor.choose(name, layer)
        at = open_for.get((chosen, layer.device))
        most = float("inf") if chosen.traits.whole_model else bucket_mb * 1e6
        if at is None or filled[at] + 4 * layer.size > most:
            at = open_for[chosen, layer.device] = len(buckets)
            buckets.append((chosen, []))
            filled[at] = 0.0
        buckets[at][1].append(name)
        filled[at] += 4 * layer.size
    if compressor.traits.whole_model and len(buckets) > 1:
        raise ValueError(f"{compressor} needs the whole model in one bucket, but its layers lie on different devices")
    return [
        Plan(source_of(chosen), Layout(tuple(names), tuple(layers[n].size for n in names), layers[names[0]].device))
        for chosen, names in buckets
    ]


def source_of(compressor: Compressor) -> Source:
    """What drives a compressor: error feedback where it needs it, else the gradients as they are."""
    driven = complete(compressor)
    return driven if isinstance(driven, Source) else Plain(driven)
