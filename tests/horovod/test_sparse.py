"""Sparse gradients under gradcomp's DistributedOptimizer: gradients are exchanged densely, and updates leave them alone."""

from __future__ import annotations

import warnings
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import torch
from doors import ALONE, OWN
from torch import Tensor, nn

pytestmark = pytest.mark.slow

EXACT = "topk:ratio=1,momentum=0,wire=exact"
OPTIMIZERS = {
    "plain": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, 0.1),
}


def trained(kind: str, door: str, spec: Any = None, **options: Any) -> tuple[Tensor, list[str]]:
    """Train an embedding of which each rank uses other rows. Return its weights, and what was said."""
    torch.manual_seed(1)
    model = nn.Embedding(10, 4, sparse=True)
    own = doors.Training(door, model, spec, inner=OPTIMIZERS[kind]([*model.parameters()]), **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(5):
            own.optimizer.zero_grad()
            rows = torch.tensor([step, step + 1, 2 * hvd.rank() + step])
            (own.model(rows) ** 2).sum().backward()
            own.optimizer.step()
    return model.weight.detach().clone(), [str(each.message) for each in said if "sparse" in str(each.message)]


def program() -> dict[str, Any]:
    hvd.init()
    known = {"sparse_as_dense": True}
    found: dict[str, Any] = {}
    for kind in OPTIMIZERS:
        found[kind] = {
            "stock": trained(kind, ALONE, **known),
            "dense": trained(kind, OWN, "dense"),
            "known": trained(kind, OWN, "dense", **known),
            "exact": trained(kind, OWN, EXACT),
            "topk": trained(kind, OWN, "topk:ratio=0.2"),
            "auto": trained(kind, OWN, "auto"),
        }
    return found


@ranks.once
def both() -> list[dict[str, Any]]:
    return ranks.launch(program, 2)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_sparse_gradients_train_as_by_horovod_and_their_dense_exchange_is_said_once(kind: str) -> None:
    """An exchange of updates of SparseAdam is another training: each rank's moments are of its own rows."""
    first, second = (each[kind] for each in both())
    stock = first["stock"][0]
    for spec, (weights, said) in first.items():
        assert torch.equal(weights, second[spec][0]), spec
        assert weights.isfinite().all()
        if spec in ("dense", "known") or (spec == "exact" and kind != "SparseAdam"):
            torch.testing.assert_close(weights, stock, rtol=1e-5, atol=1e-6)
        own = [text for text in said if "gradcomp exchanges it densely" in text]
        assert len(own) == (spec in ("dense", "auto")), (spec, said)
    assert not torch.equal(first["topk"][0], stock)
