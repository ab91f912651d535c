"""The ways that sparse entries can take to a common update: a knob of the compressors that send such."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gradcomp import paths, split, tree
from gradcomp.core import Acc, Payload, Steps, World
from gradcomp.paths import Taken

ROUTES = ("allgather", "tree", "split")


def check(name: str, route: str, form: str) -> None:
    """Refuses what is no route, and what is no form of a sparse entry on the wire."""
    if route not in ROUTES:
        raise ValueError(f"{name}: route must be one of {', '.join(ROUTES)}, not {route!r}")
    paths.check_wire(name, form)


def room(acc: Acc, capacity: int, form: str, route: str) -> Taken:
    """Room for what a rank takes. Entries that add up on their way through a tree are always exact."""
    return paths.room(acc, capacity, "exact" if route == "tree" else form)


def masked(acc: Acc, route: str) -> Tensor | None:
    """The velocity that a take has to mask: none in a tree, where only its end tells what went."""
    return None if route == "tree" else acc.velocity


def send(
    acc: Acc,
    taken: Taken,
    world: World,
    route: str,
    keep: float = 0.0,
    seen: Callable[[Sequence[Payload]], None] = lambda came: None,
) -> Steps:
    """The mean update of what all ranks took, or of its largest part; what did not go stays with somebody.

    If a rank met a gradient that is not finite, the update is not finite on all ranks and every rank takes its entries back.
    What went leaves keep times itself behind. seen() is shown payloads whose counts say how many entries wanted to travel.
    """
    if route == "tree":
        return (yield from tree.sparse_sum(acc, taken.payload, world, keep=keep, seen=seen))
    if route == "split" and split.Parts(acc.value.numel(), world.size).room(len(taken.values)) > 0:
        return (yield from split.sparse_sum(acc, taken, world, keep, seen))
    return (yield from paths.sparse_allgather(acc, taken, world, keep, seen))
