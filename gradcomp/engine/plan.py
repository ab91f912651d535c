"""The plan of a model's buckets: which layers share one."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from gradcomp.engine.collector import Collector, NoFeedback
from gradcomp.engine.feedback import Feedback, with_feedback
from gradcomp.protocol import Compressor, Layer, Layout


class Plan(NamedTuple):
    """The plan of one bucket: the collector around its compressor, and its layers."""

    collector: Collector
    layout: Layout


def plan(layers: Mapping[str, Layer], bucket_mb: float, compressor: Compressor) -> list[Plan]:
    """Group the layers into buckets of one compressor each, last layer first, since backward reaches it first.

    bucket_mb: the largest size of a bucket, in 10^6 bytes of float32. A bucket may be larger if it holds one layer, or if its
    compressor needs the whole model. Empty layers are left out.
    """
    given: Any = bucket_mb
    if not isinstance(given, numbers.Real) or not float(given) > 0:
        raise ValueError(f"bucket_mb={given!r} must be a number above 0")
    if layers and (reason := compressor.misfit(list(layers))):
        warnings.warn(f"{compressor}: {reason}", stacklevel=2)
    buckets: list[tuple[Compressor, list[str]]] = []
    last_of: dict[tuple[Compressor, torch.device], int] = {}
    sizes: dict[int, float] = {}
    for name in reversed(list(layers)):
        layer = layers[name]
        if layer.size == 0:
            continue
        chosen = compressor.choose(name, layer)
        index = last_of.get((chosen, layer.device))
        limit = float("inf") if chosen.traits.whole_model else bucket_mb * 1e6
        if index is None or sizes[index] + 4 * layer.size > limit:
            index = last_of[chosen, layer.device] = len(buckets)
            buckets.append((chosen, []))
            sizes[index] = 0.0
        buckets[index][1].append(name)
        sizes[index] += 4 * layer.size
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
