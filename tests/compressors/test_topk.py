"""topk: the largest entries of each bucket, exactly, with error feedback."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import reference
import torch

import gradcomp
from gradcomp.exchanges.split import Partition


def payload(n: int, k: int, wire: str = "compact") -> int:
    """Count a payload's bytes. An exact one has 8 for the header, then k values and k indices, each rounded up to 8 bytes."""
    packed = {"compact": reference.compact_bytes, "coarse": reference.coarse_bytes}
    return packed[wire](n, k) if wire in packed else 8 + 2 * 8 * math.ceil(k / 2)


def _bytes(ratio: float, wire: str = "compact") -> Callable[[int], int]:
    return lambda n: payload(n, max(1, math.ceil(ratio * n)), wire)


def split_bytes(n: int, k: int, world: int, wire: str = "compact") -> int:
    """Count a payload to each other rank, and one to all; one of everything to all if a part may have less than a line."""
    parts = Partition(n, world)
    capacity = min(k, math.ceil(1.1 * k / world + 3 * math.sqrt(k / world)), n // (64 * world) * 64)
    return world * payload(parts.size, capacity, wire) if capacity else payload(n, k, wire)


def tree_bytes(n: int, k: int, rank: int, world: int) -> int:
    """Count a rank's bytes in a tree: one payload up, except from the root, and one down to each child."""
    children = sum(1 for level in range(20) if rank % (2 << level) == 0 and rank + (1 << level) < world)
    return ((rank > 0) + children) * payload(n, k, "exact")


def _routed(ratio: float, route: str, wire: str = "compact") -> Callable[[int, int, int], int]:
    def promised(n: int, rank: int, world: int) -> int:
        k = max(1, math.ceil(ratio * n))
        return tree_bytes(n, k, rank, world) if route == "tree" else split_bytes(n, k, world, wire)

    return promised


PROMISED_BYTES: dict[str, Callable[..., int]] = {
    "topk": _bytes(0.01),
    "topk:ratio=0.03": _bytes(0.03),
    "topk:ratio=0.5": _bytes(0.5),
    "topk:ratio=1,wire=exact": _bytes(1.0, "exact"),
    "topk:ratio=0.03,route=split": _routed(0.03, "split"),
    "topk:ratio=0.2,route=split,wire=exact": _routed(0.2, "split", "exact"),
    "topk:ratio=0.03,wire=coarse": _bytes(0.03, "coarse"),
    "topk:ratio=0.2,route=split,wire=coarse": _routed(0.2, "split", "coarse"),
    "topk:ratio=0.03,route=tree": _routed(0.03, "tree"),
    "topk:ratio=0.03,by_host=true": lambda n, rank, world: (world - 1) * payload(n, math.ceil(0.03 * n)),
}


def test_each_rank_sends_its_largest_and_keeps_the_rest() -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.25", {"w": (8,)}, 2)
    first = torch.tensor([0.0, 1, 2, 3, 4, 5, 6, -7])
    second = torch.tensor([8.0, 0, 0, 0, 0, 0, 6, 0])
    update = simulation.step([{"w": first}, {"w": second}])
    assert update["w"].tolist() == [4, 0, 0, 0, 0, 0, 8, -4]  # 6 and -7 travel as 8 and -8, 8 as it is
    assert simulation.residual(0)["w"].tolist() == [0, 1, 2, 3, 4, 5, -2, 1]
    assert simulation.residual(1)["w"].tolist() == [0, 0, 0, 0, 0, 0, -2, 0]


def test_the_residual_comes_with_the_next_step() -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.5", {"w": (2,)}, 1)
    assert simulation.step([{"w": torch.tensor([4.0, 2.0])}])["w"].tolist() == [4, 0]
    assert simulation.step([{"w": torch.tensor([3.0, 2.0])}])["w"].tolist() == [0, 4]


@pytest.mark.parametrize("n,ratio,k", [(1000, 0.001, 1), (1001, 0.001, 2), (10, 0.001, 1), (10, 1.0, 10), (7, 0.5, 4)])
def test_k_is_the_ratio_rounded_up(n: int, ratio: float, k: int) -> None:
    simulation = gradcomp.Simulation(f"topk:ratio={ratio}", {"w": (n,)}, 1)
    assert simulation.step([{"w": torch.arange(1.0, n + 1)}])["w"].count_nonzero() == k


def test_the_ratio_holds_per_bucket() -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.1", {"large": (1000,), "small": (1000,)}, 1, bucket_mb=0.004)
    update = simulation.step([{"large": torch.full((1000,), 9.0), "small": torch.ones(1000)}])
    assert update["large"].count_nonzero() == update["small"].count_nonzero() == 100
