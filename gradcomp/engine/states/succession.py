"""From one reducer to the next: what waits is carried over when the spec or the number of ranks changes."""

from __future__ import annotations

from dataclasses import replace

from gradcomp.core.by_layer import ByLayer
from gradcomp.core.compressor import Compressor
from gradcomp.engine.buckets.collector import Collector
from gradcomp.engine.states.kept_arrays import (
    ARRAYS,
    OF_OPTIMIZER,
    adam_steps,
    copies,
    make_moments,
    rates,
    set_rates,
    views,
)
from gradcomp.engine.steps.feedback import Feedback
from gradcomp.engine.steps.reducer import Reducer
from gradcomp.native.extension import LARGEST


def successor(compressor: Compressor, old: Reducer) -> Compressor:
    """Prepare a compressor to follow an old reducer: add error feedback if the old one has residuals to carry over."""
    if not old.keeps_residual:
        return compressor
    if isinstance(compressor, Collector):
        if isinstance(compressor, Feedback) and not (compressor.feedback or compressor.inner.traits.fed_back):
            try:
                return replace(compressor, feedback=True)
            except ValueError as error:
                raise ValueError(f"{compressor} would lose the residual, which has not been sent yet; {error}") from None
        if not compressor.keeps_residual:
            raise ValueError(
                f"{compressor} would lose the residual, which has not been sent yet; use a spec with error feedback"
            )
        return compressor
    if isinstance(compressor, ByLayer):
        rules = tuple((pattern, successor(chosen, old)) for pattern, chosen in compressor.rules)
        return ByLayer(rules, successor(compressor.default, old))
    return Feedback(compressor)


def carry(old: Reducer, new: Reducer) -> Reducer:
    """Copy residuals, and moments if both keep them, from one reducer to another with the same layers. Return the new one.

    A residual of Adam's directions is dropped where the new reducer exchanges gradients: they are thousands of times smaller.
    """
    for array in OF_OPTIMIZER:
        make_moments(new, array, views(old, array))
    directions = views(old, "second").keys() - views(new, "second").keys()
    for array in ARRAYS:
        before = copies(old, array)
        for name, view in views(new, array).items():
            if name in before and not (array == "residual" and name in directions):
                view.copy_(before[name])
    set_rates(new, rates(old))
    new.steps_done = old.steps_done
    noises = {name: bucket.state.noise for bucket in old.buckets for name in bucket.layout.names}
    for bucket in new.buckets:
        noise = noises[bucket.layout.names[0]]
        bucket.state.noise = bucket.state.noise.going_on_from(noise.save())
        bucket.state.noise.of_mean = noise.of_mean
        bucket.state.adam_steps = adam_steps(old)
    return new


def scale(reducer: Reducer, factor: float) -> None:
    """Multiply what waits. What exceeds the largest magnitude is lost.

    Adam's moments stay, unless the factor is 0. So does a velocity beside which nothing waits, unless ranks have joined.
    """
    of_adam, waits = views(reducer, "second"), views(reducer, "residual")
    for array in ARRAYS:
        for name, view in views(reducer, array).items():
            stays = array != "residual" and (name in of_adam or (name not in waits and factor < 1))
            if factor == 0 or not stays:
                view.mul_(factor).clamp_(-LARGEST, LARGEST)
    for bucket in reducer.buckets if factor == 0 else ():
        bucket.state.adam_steps = 0
