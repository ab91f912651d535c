"""bingrad: one bit an entry; the mean of a group stays, or its largest entries do not count more than the best level."""

from __future__ import annotations

from collections.abc import Callable

import gradients
import pytest
from compressors.test_orq import rounded_bytes
from torch import Tensor

import gradcomp

PROMISED_BYTES: dict[str, Callable[..., int]] = {
    "bingrad:feedback=true,group=64,route=allgather": rounded_bytes(64, 2, 2),
    "bingrad:threshold=lloyd,feedback=true,group=100,route=alltoall": rounded_bytes(100, 2, 2, "alltoall"),
    "bingrad:form=pb,feedback=true,group=64,route=allgather": rounded_bytes(64, 2, 1),
}


def draw(kind: str, n: int) -> Tensor:
    return gradients.draw("normal", n, 0) + 0.5 if kind == "shifted" else gradients.draw(kind, n, 0)


def error_of(update: Tensor, value: Tensor) -> float:
    return float((update - value).square().sum() / value.square().sum())


@pytest.mark.parametrize("threshold", ["mean", "lloyd"])
@pytest.mark.parametrize("kind,error", [("normal", 0.363), ("laplace", 0.504), ("shifted", 0.299)])
def test_its_error_is_the_known_one(kind: str, error: float, threshold: str) -> None:
    """Over the squares of the entries: a Gaussian's is 1 - 2 / pi."""
    value = draw(kind, 2048 * 40)
    update = gradcomp.Simulation(f"bingrad:threshold={threshold}", {"w": (len(value),)}, 1).step([{"w": value}])["w"]
    assert error_of(update, value) == pytest.approx(error, abs=0.01)
    sums = update.view(-1, 2048).double().sum(1) - value.view(-1, 2048).double().sum(1)
    assert sums.abs().max() < 1e-2


@pytest.mark.parametrize("kind,level,error", [("normal", 0.6471, 0.455), ("laplace", 0.8065, 0.583)])
def test_partly_biased_has_one_level_of_a_known_size(kind: str, level: float, error: float) -> None:
    value = draw(kind, 2048 * 40)
    update = gradcomp.Simulation("bingrad:form=pb", {"w": (len(value),)}, 1).step([{"w": value}])["w"]
    assert float(update.abs().mean()) == pytest.approx(level, abs=0.01)
    assert len(update.abs().unique()) == 40
    assert error_of(update, value) == pytest.approx(error, abs=0.01)
