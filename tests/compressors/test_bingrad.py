"""bingrad: one bit an entry; the mean of a group stays, or its largest entries do not count more than the best level."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compressors.test_orq import rounded_bytes

import gradcomp

PROMISED_BYTES: dict[str, Callable[..., int]] = {
    "bingrad:group=64,route=allgather": rounded_bytes(64, 2, 2),
    "bingrad:threshold=lloyd,group=100,route=alltoall": rounded_bytes(100, 2, 2, "alltoall"),
    "bingrad:form=pb,group=64,route=allgather": rounded_bytes(64, 2, 1),
}


@pytest.mark.parametrize("kind,error", [("normal", 0.363), ("laplace", 0.504), ("shifted", 0.299)])
def test_its_error_is_the_known_one(kind: str, error: float) -> None:
    """Over the squares of the entries: a Gaussian's is 1 - 2 / pi."""
    torch.manual_seed(0)
    n = 2048 * 40
    value = torch.randn(n) + (0.5 if kind == "shifted" else 0.0)
    if kind == "laplace":
        value = torch.distributions.Laplace(0.0, 1.0).sample((n,))
    simulation = gradcomp.Simulation("bingrad", {"w": (n,)}, 1)
    update = simulation.step([{"w": value}])["w"]
    assert float((update - value).square().sum() / value.square().sum()) == pytest.approx(error, abs=0.01)
    sums = update.view(-1, 2048).double().sum(1) - value.view(-1, 2048).double().sum(1)
    assert sums.abs().max() < 1e-2


def test_partly_biased_has_one_level_of_a_known_size() -> None:
    torch.manual_seed(0)
    update = gradcomp.Simulation("bingrad:form=pb", {"w": (2048 * 40,)}, 1).step([{"w": torch.randn(2048 * 40)}])["w"]
    assert float(update.abs().mean()) == pytest.approx(0.6471, abs=0.01)
    assert len(update.abs().unique()) == 40


def test_its_spec() -> None:
    for bad in ("form=c", "threshold=median"):
        with pytest.raises(ValueError, match="bingrad: "):
            gradcomp.make(f"bingrad:{bad}")
