"""The plan of a model's buckets: which layers share one."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from gradcomp.core.compressor import Compressor, Layer, Layout
from gradcomp.engine.buckets.collector import Collector, NoFeedback
from gradcomp.engine.steps.feedback import Feedback, with_feedback

# The most entries of a bucket: kernels number them in 32 bits, of which one is the sign.
MOST_ENTRIES = 2**31 - 1


class Plan(NamedTuple):
    """The plan of one bucket: the collector around its compressor, and its layers."""

    collector: Collector
    layout: Layout


def plan(layers: Mapping[str, Layer], bucket_mb: float, compressor: Compressor) -> list[Plan]:
    """Group the layers into buckets of one compressor each, last layer first, since backward reaches it first.

    bucket_mb: the largest size of a bucket, in 10^6 bytes of float32. A bucket may be larger if it holds one layer, or if its
    compressor needs the whole model; but no bucket has more than MOST_ENTRIES. Empty layers are left out.
    """
    given: Any = bucket_mb
    if not isinstance(given, numbers.Real) or not float(given) > 0:
        raise ValueError(f"bucket_mb={given!r} must be a number above 0")
    if layers and (reason := compressor.misfit(list(layers))):
        warnings.warn(f"{compressor}: {reason}", stacklevel=2)
    buckets: list[tuple[Compressor, list[str]]] = []
    last_of: dict[tuple[Compressor, torch.device], int] = {}
    sizes: dict[int, int] = {}
    for name in reversed(list(layers)):
        layer = layers[name]
        if layer.size == 0:
            continue
        if layer.size > MOST_ENTRIES:
            raise ValueError(
                f"the layer {name!r} has {layer.size} entries, but a layer that is exchanged must have fewer than 2^31; divide "
                "it into several parameters"
            )
        chosen = compressor.choose(name, layer)
        index = last_of.get((chosen, layer.device))
        most = MOST_ENTRIES if chosen.traits.whole_model else min(bucket_mb * 1e6 / 4, MOST_ENTRIES)
        if index is None or sizes[index] + layer.size > most:
            index = last_of[chosen, layer.device] = len(buckets)
            buckets.append((chosen, []))
            sizes[index] = 0
        buckets[index][1].append(name)
        sizes[index] += layer.size
    if compressor.traits.whole_model and sum(sizes.values()) > MOST_ENTRIES:
        raise ValueError(
            f"{compressor} needs the whole model in one bucket, but the model has {sum(sizes.values())} entries, and a bucket "
            "must have fewer than 2^31; use a compressor, or knobs, that let each bucket go by itself"
        )
    if compressor.traits.whole_model and len(buckets) > 1:
        raise ValueError(
            f"{compressor} needs the whole model in one bucket, but the model's layers are on several devices; move them to one"
        )
    collectors = _with_one_momentum([collector_of(chosen) for chosen, _ in buckets])
    return [
        Plan(collector, Layout(tuple(names), tuple(layers[n].size for n in names), layers[names[0]].device))
        for collector, (_, names) in zip(collectors, buckets, strict=True)
    ]


def _with_one_momentum(collectors: list[Collector]) -> list[Collector]:
    """Let all collectors apply the optimizer's momentum if any does: it can be taken over only for all layers."""
    if not any(collector.takes_momentum for collector in collectors):
        return collectors
    return [Feedback(each.inner, feedback=False) if isinstance(each, NoFeedback) else each for each in collectors]


def collector_of(compressor: Compressor) -> Collector:
    """Put a collector around a compressor: Feedback if the compressor needs it, else NoFeedback."""
    made = with_feedback(compressor)
    return made if isinstance(made, Collector) else NoFeedback(made)
