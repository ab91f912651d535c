"""A rank that joins an elastic job has seen no gradient yet. It goes on with the optimizer as the others do."""

from __future__ import annotations

import itertools
from typing import Any

import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from doors import COMPRESSION, OWN, Training
from horovod.torch.elastic.state import OptimizerStateHandler

from gradcomp.engine.updates.step_exchange import FIRST_COMPARED

pytestmark = pytest.mark.slow

STEPS = 3
LATER = FIRST_COMPARED[0]  # on all ranks, the comparison of their weights is due after as many
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.02),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}
SPECS = ["topk:ratio=0.05", "topk:ratio=0.05,momentum=0"]
# The optimizer is passed as optimizer=, or found.
WAYS = [(OWN, True), (COMPRESSION, True), (COMPRESSION, False)]
CASES = list(itertools.product(WAYS, SPECS, OPTIMIZERS))


def made(case: int) -> tuple[Training, Any]:
    """Make all that a rank of an elastic job makes."""
    model = small_net.net(seed=7 + hvd.rank())
    (door, given), spec, kind = CASES[case]
    run = Training(door, model, spec, prefix=f"{case}.", inner=OPTIMIZERS[kind](model.parameters()), given=given)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], 0.1)
    state = hvd.elastic.TorchState(model=model, optimizer=run.optimizer, plain=plain)
    assert type(state._handlers["plain"]) is OptimizerStateHandler, "other optimizers keep Horovod's own"
    return run, state


def joining() -> list[dict[str, Any]]:
    """Train on two ranks. Then rank 1 leaves, and another one joins in its place, after the rate has changed.

    In every other case the rank that stays had a failure before.
    """
    hvd.init()
    every = [made(case) for case in range(len(CASES))]
    before = []
    for case, (run, state) in enumerate(every):
        state.sync()
        run.train(STEPS)
        for group in run.optimizer.param_groups:
            group["lr"] /= 2
        state.save()
        before.append(run.residual() if hvd.rank() == 0 else {})
        if case % 2:
            run.train(1)
            state.restore()
    ranks.start_anew()
    if hvd.rank() == 1:
        every = [made(case) for case in range(len(CASES))]
    found = []
    for (run, state), residual in zip(every, before, strict=True):
        if hvd.rank() == 0:
            state.on_reset()
        state.sync()
        left = run.residual()
        found.append({"kept": all(torch.equal(left[name], own) for name, own in residual.items())})
        found[-1]["rates"] = [group["lr"] for group in run.optimizer.param_groups]
        found[-1]["weights"] = run.train(LATER)
        found[-1]["steps"] = run.handle.stats()["steps"]
    return found


outcomes = ranks.once(lambda: ranks.launch(joining, 2, anew=1))


@pytest.mark.parametrize("case", range(len(CASES)), ids=[" ".join([*map(str, way), spec, kind]) for way, spec, kind in CASES])
def test_a_rank_that_joins_goes_on_as_the_others_do(case: int) -> None:
    first, second = (found[case] for found in outcomes())
    assert first["steps"] == second["steps"] == STEPS + LATER
    assert first["kept"] and first["rates"] == second["rates"]
    assert torch.equal(first["weights"], second["weights"])
