"""The context of a step: the facts that all buckets of a step share, and the bytes that it sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gradcomp.core.compressor import Layout
from gradcomp.core.requests import World
from gradcomp.native.memory import Memory


def layer_rates(names: Mapping[int, str], optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, float]:
    """Return the learning rate of each layer that these optimizers train. names: by the id of the parameter."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {names[id(each)]: float(group["lr"]) for group in groups for each in group["params"] if id(each) in names}


@dataclass
class Traffic:
    """The bytes that a rank hands to the network in a step. between_hosts: as many of them as go to other hosts. dense: of all
    that the step exchanges, as float32. gathered, reduced: as many of those sent as a ring of all ranks gathers or adds up.
    """

    sent: int = 0
    between_hosts: int = 0
    dense: int = 0
    gathered: int = 0
    reduced: int = 0

    def on_interface(self, world: World) -> float:
        """Return the bytes that leave this rank's host. Where all ranks are on one, each counts as a host of its own."""
        hosts = world.hosts if world.hosts is not None and len({*world.hosts}) > 1 else range(world.size)
        sends = (self.sent if isinstance(hosts, range) else self.between_hosts) - self.gathered - self.reduced
        return (world.size - 1) * (self.gathered + 2 * self.reduced / world.size) + sends * hosts.count(hosts[world.rank])


class StepContext:
    """The facts of a step that do not depend on its gradients. One object serves all steps of a reducer.

    memory: the lender of scratch. uses_rates: the compressor reads layer_rates, the learning rates by layer; None where they
    are unknown. scale: by which means are multiplied. has_begun: a bucket of the step has started. world: the ranks of the
    exchange. frozen_layers: the names of all frozen layers.
    """

    world: World

    def __init__(self, memory: Memory, uses_rates: bool):
        self.memory, self.uses_rates = memory, uses_rates
        self.scale, self.has_begun = 1.0, False
        self.layer_rates: Mapping[str, float] | None = None
        self.frozen_layers: frozenset[str] = frozenset()

    def rates(self, layout: Layout) -> tuple[float, ...] | None:
        """Return the learning rate of each layer of a bucket, for a compressor that reads them."""
        rates = self.layer_rates if self.uses_rates else None
        return None if rates is None else tuple([rates.get(name, 0.0) for name in layout.names])

    def frozen(self, layout: Layout) -> Sequence[int]:
        """Return the numbers of a bucket's frozen layers."""
        frozen = self.frozen_layers
        return [i for i, name in enumerate(layout.names) if name in frozen] if frozen else ()
