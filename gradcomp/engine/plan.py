"""The plan of a model's buckets: which layers share one."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradcomp.aliases import GradcompWarning
from gradcomp.core.compressor import Compressor, Layer, Layout
from gradcomp.engine.feedback import Feedback, with_feedback

# The most entries of a bucket: kernels number them in 31 bits and a sign.
MOST_ENTRIES = 2**31 - 1


def checked_shapes(shapes: Any, subject: str) -> dict[str, tuple[int, ...]]:
    """Check the shapes of layers, by name. subject: of the sentence that refuses something else."""
    if not isinstance(shapes, Mapping):
        raise ValueError(f"{subject} is a {type(shapes).__name__}; pass {{name: shape}}")
    found = {name: tuple(shape) if isinstance(shape, Iterable) else shape for name, shape in shapes.items()}
    for name, shape in found.items():
        if not isinstance(shape, tuple) or not all(
            hasattr(size, "__index__") and not isinstance(size, bool) and size >= 0 for size in shape
        ):
            shown = list(shape) if isinstance(shape, tuple) else shape
            raise ValueError(f"the shape {shown} of {name!r} must be whole numbers that are not negative")
        if math.prod(shape) > MOST_ENTRIES:
            raise ValueError(f"{name!r} has {math.prod(shape)} entries, but a layer must have fewer than 2^31; divide it")
    return found


class Plan(NamedTuple):
    """The plan of one bucket: its layers, and its compressor with the error feedback around it, if it needs any."""

    layout: Layout
    compressor: Compressor
    feedback: Feedback | None


def plan(
    layers: Mapping[str, Layer],
    bucket_mb: float,
    compressor: Compressor,
    parts: Mapping[str, Hashable] | None = None,
    wraps_all: bool = False,
    names: Sequence[str] = (),
) -> list[Plan]:
    """Group the layers into buckets of one compressor each, last layer first, since backward reaches it first.

    bucket_mb: the largest size of a bucket, in 10^6 bytes of float32. A bucket may be larger if it holds one layer, or if its
    compressor needs the whole model; but no bucket has more than MOST_ENTRIES. Empty layers are left out.
    parts: by layer; layers of different parts share no bucket. wraps_all: exact compressors get a residual, too. names: see
    Options.
    """
    given: Any = bucket_mb
    if not isinstance(given, numbers.Real) or not float(given) > 0:
        raise ValueError(f"bucket_mb={given!r} must be a number above 0")
    if layers and (reason := compressor.misfit(names or list(layers))):
        warnings.warn(f"{compressor}: {reason}", GradcompWarning, stacklevel=2)
    buckets: list[tuple[Compressor, list[str]]] = []
    last_of: dict[tuple[Compressor, torch.device, Hashable], int] = {}
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
        kin = chosen, layer.device, parts[name] if parts else 0
        index = last_of.get(kin)
        most = MOST_ENTRIES if chosen.traits.whole_model else min(bucket_mb * 1e6 / 4, MOST_ENTRIES)
        if index is None or sizes[index] + layer.size > most:
            index = last_of[kin] = len(buckets)
            buckets.append((chosen, []))
            sizes[index] = 0
        buckets[index][1].append(name)
        sizes[index] += layer.size
    if compressor.traits.whole_model and sum(sizes.values()) > MOST_ENTRIES:
        raise ValueError(
            f"{compressor} needs the whole model in one bucket, but the model has {sum(sizes.values())} entries, and a bucket "
            "must have fewer than 2^31; use a compressor, or knobs, that let each bucket go by itself"
        )
    if compressor.traits.whole_model and len({device for _, device, _ in last_of}) > 1:
        raise ValueError(
            f"{compressor} needs the whole model in one bucket, but the model's layers are on several devices; move them to one"
        )
    wrapped = [with_feedback(chosen) for chosen, _ in buckets]
    if wraps_all:
        wrapped = [each if isinstance(each, Feedback) else Feedback(each, feedback=False) for each in wrapped]
    plans = []
    for compressor, (_, names) in zip(wrapped, buckets, strict=True):
        layout = Layout(tuple(names), tuple(layers[n].size for n in names), layers[names[0]].device)
        feedback = compressor if isinstance(compressor, Feedback) else None
        plans.append(Plan(layout, compressor if feedback is None else feedback.inner, feedback))
    return plans
