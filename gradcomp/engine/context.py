"""The context of a step: the facts that all buckets of a step share, made once a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gradcomp.core.compressor import Layout
from gradcomp.core.requests import World
from gradcomp.native.memory import Memory


def layer_rates(names: Mapping[int, str], optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, float]:
    """Return the learning rate of each layer that these optimizers train. names: by the id of the parameter."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {names[id(each)]: float(group["lr"]) for group in groups for each in group["params"] if id(each) in names}


@dataclass(eq=False)
class StepContext:
    """The facts of a step that do not depend on its gradients.

    memory: the lender of scratch. world: the ranks of the exchange. layer_rates: the learning rates by layer; None where they
    are unknown, or the compressor does not use them. frozen_layers: the names of all frozen layers.
    """

    memory: Memory
    world: World
    layer_rates: Mapping[str, float] | None = None
    frozen_layers: frozenset[str] = field(default_factory=frozenset)

    def rates(self, layout: Layout) -> tuple[float, ...] | None:
        """Return the learning rate of each layer of a bucket."""
        rates = self.layer_rates
        return None if rates is None else tuple([rates.get(name, 0.0) for name in layout.names])

    def frozen(self, layout: Layout) -> Sequence[int]:
        """Return the numbers of a bucket's frozen layers."""
        frozen = self.frozen_layers
        return [i for i, name in enumerate(layout.names) if name in frozen] if frozen else ()
