"""topk: the largest entries of each bucket, exactly, with error feedback."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import gradcomp
from gradcomp.compressors.topk import TopK
from gradcomp.wrap import Feedback


def _bytes(ratio: float, wire: str = "compact") -> Callable[[int], int]:
    """A header of 8 bytes; k entries and a word for every 2^16, or k values and k indices; each array rounded up to 8 bytes."""

    def promised(n: int) -> int:
        k = 8 * math.ceil(max(1, math.ceil(ratio * n)) / 2)
        return 8 + (k + 8 * math.ceil(math.ceil(n / 65536) / 2) if wire == "compact" else 2 * k)

    return promised


PROMISED_BYTES = {
    "topk": _bytes(0.001),
    "topk:ratio=0.03": _bytes(0.03),
    "topk:ratio=0.5": _bytes(0.5),
    "topk:ratio=1,wire=exact": _bytes(1.0, "exact"),
}


def test_each_rank_sends_its_largest_and_keeps_the_rest() -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.25", {"w": (8,)}, 2)
    first = torch.tensor([0.0, 1, 2, 3, 4, 5, 6, -7])
    second = torch.tensor([8.0, 0, 0, 0, 0, 0, 6, 0])
    update = simulation.step([{"w": first}, {"w": second}])
    assert update["w"].tolist() == [4, 0, 0, 0, 0, 0, 6, -3.5]
    assert simulation.residual(0)["w"].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert not simulation.residual(1)["w"].any()


def test_what_was_kept_comes_with_the_next_step() -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.5", {"w": (2,)}, 1)
    assert simulation.step([{"w": torch.tensor([3.0, 2.0])}])["w"].tolist() == [3, 0]
    assert simulation.step([{"w": torch.tensor([3.0, 2.0])}])["w"].tolist() == [0, 4]


@pytest.mark.parametrize("n,ratio,k", [(1000, 0.001, 1), (1001, 0.001, 2), (10, 0.001, 1), (10, 1.0, 10), (7, 0.5, 4)])
def test_k_is_the_ratio_rounded_up(n: int, ratio: float, k: int) -> None:
    simulation = gradcomp.Simulation(f"topk:ratio={ratio}", {"w": (n,)}, 1)
    assert simulation.step([{"w": torch.arange(1.0, n + 1)}])["w"].count_nonzero() == k


def test_the_ratio_holds_per_bucket() -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.1", {"large": (1000,), "small": (1000,)}, 1, bucket_mb=0.004)
    update = simulation.step([{"large": torch.full((1000,), 9.0), "small": torch.ones(1000)}])
    assert update["large"].count_nonzero() == update["small"].count_nonzero() == 100


def test_its_spec() -> None:
    assert gradcomp.make("topk:ratio=0.01,momentum=0.9") == Feedback(TopK(ratio=0.01), momentum=0.9)
    for bad in ("topk:ratio=0", "topk:ratio=1.1", "topk:ratio=-1", "topk:ratio=nan", "topk:wire=morse"):
        with pytest.raises(ValueError, match=r"topk: (ratio|wire) must"):
            gradcomp.make(bad)
