"""A rank that joins an elastic job has seen no gradient yet. It goes on with the optimizer as the others do."""

from __future__ import annotations

import itertools
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch

pytestmark = pytest.mark.slow

STEPS = 3
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.02),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}
SPECS = ["topk:ratio=0.05", "topk:ratio=0.05,momentum=0"]
# The optimizer is passed as optimizer=, or found.
WAYS = [(doors.OWN, True), (doors.COMPRESSION, True), (doors.COMPRESSION, False)]
CASES = list(itertools.product(WAYS, SPECS, OPTIMIZERS))


def made(prefix: str, way: tuple[str, bool], spec: str, kind: str) -> tuple[torch.nn.Module, Any, Any]:
    """Make all that a rank of an elastic job makes."""
    model = small_net.net(seed=7 + hvd.rank())
    door, given = way
    plain = OPTIMIZERS[kind](model.parameters())
    optimizer = doors.wrapped(door, plain, doors.named(model, prefix), spec, given=given)
    return model, optimizer, hvd.elastic.TorchState(model=model, optimizer=optimizer)


def joining() -> list[dict[str, Any]]:
    """Train on two ranks. Then rank 1 leaves, and another one joins in its place, after the rate has changed."""
    hvd.init()
    every = [made(f"{i}.", *case) for i, case in enumerate(CASES)]
    before = []
    for model, optimizer, state in every:
        state.sync()
        small_net.train(model, optimizer, doors.batches(), STEPS)
        for group in optimizer.param_groups:
            group["lr"] /= 2
        state.save()
        before.append(optimizer.compression.residual() if hvd.rank() == 0 else {})
    ranks.start_anew()
    if hvd.rank() == 1:
        every = [made(f"{i}.", *case) for i, case in enumerate(CASES)]
    found = []
    for (model, optimizer, state), residual in zip(every, before, strict=True):
        if hvd.rank() == 0:
            state.on_reset()
        state.sync()
        left = optimizer.compression.residual()
        found.append({"kept": all(torch.equal(left[name], own) for name, own in residual.items())})
        found[-1]["rates"] = [group["lr"] for group in optimizer.param_groups]
        found[-1]["weights"] = small_net.train(model, optimizer, doors.batches(1), STEPS)
        found[-1]["steps"] = optimizer.compression.stats()["steps"]
    return found


outcomes = ranks.once(lambda: ranks.launch(joining, 2, anew=1))


@pytest.mark.parametrize("case", range(len(CASES)), ids=[" ".join([*map(str, way), spec, kind]) for way, spec, kind in CASES])
def test_a_rank_that_joins_goes_on_as_the_others_do(case: int) -> None:
    first, second = (found[case] for found in outcomes())
    assert first["steps"] == second["steps"] == 2 * STEPS
    assert first["kept"] and first["rates"] == second["rates"]
    assert torch.equal(first["weights"], second["weights"])
