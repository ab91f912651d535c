"""The optimizer's own state: Horovod broadcasts rank 0's to all, without any residual in it; and an optimizer's end."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from typing import Any

import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from doors import ALONE, DOORS, Training

from gradcomp.engine.updates import steps

pytestmark = pytest.mark.slow

# Checkpoints of rank 0: the door, the optimizer, and the weight decay, by which a step of Horovod's own moves weights.
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters, decay: torch.optim.SGD(parameters, 0.02, momentum=0.9, weight_decay=decay),
    "AdamW": lambda parameters, decay: torch.optim.AdamW(parameters, 0.01, weight_decay=decay),
}
RESUMED = [*itertools.product(DOORS, OPTIMIZERS, (0.0, 0.01))]
SPECS = ["dense", "topk:ratio=0.05", "auto"]


def broadcast() -> dict[str, dict[str, Any]]:
    """Return the state_dict of an optimizer that keeps its momentum, before and after Horovod broadcasts it."""
    hvd.init()
    found = {}
    for door in DOORS:
        run = Training(door, spec="topk:ratio=0.05,momentum=0", momentum=0.9, bucket_mb=0.015)
        run.train(3)
        residual, before = run.residual(), run.optimizer.state_dict()
        hvd.broadcast_optimizer_state(run.optimizer, 0)
        plain = torch.optim.SGD(run.model.parameters(), 0.02, momentum=0.9).state_dict()
        found[door] = {
            "keys": {key for entry in before["state"].values() for key in entry},
            "groups": [[sorted(group) for group in state["param_groups"]] for state in (before, plain)],
            "buffers": [entry["momentum_buffer"].clone() for entry in run.optimizer.state_dict()["state"].values()],
            "kept": all(torch.equal(left, residual[name]) for name, left in run.residual().items()),
            "residual": residual["last.weight"],
            "weights": run.train(3),
        }
    return found


def resumed_on_rank_0(door: str, kind: str, decay: float) -> dict[str, Any]:
    """Load a checkpoint of rank 0's optimizer on rank 0 alone, before the first step, and broadcast it.

    Under topk, SGD has no state: its momentum is hidden. Horovod makes one, by a step of every rank's that has none.
    """

    def made() -> Training:
        model = small_net.net()
        return Training(door, model, spec="topk:ratio=0.05", inner=OPTIMIZERS[kind](model.parameters(), decay), bucket_mb=0.015)

    run = made()
    hvd.broadcast_parameters(run.model.state_dict(), 0)
    hvd.broadcast_optimizer_state(run.optimizer, 0)
    run.train(3)
    saved, weights = run.optimizer.state_dict(), run.model.state_dict()
    del run
    gc.collect()
    run = made()
    if hvd.rank() == 0:
        run.optimizer.load_state_dict(saved)
        run.model.load_state_dict(weights)
    hvd.broadcast_optimizer_state(run.optimizer, 0)
    hvd.broadcast_parameters(run.model.state_dict(), 0)  # last: weight decay moves weights in the step that makes a state
    exchanged = run.handle.stats()["steps"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained = run.train(3)
    return {"weights": trained, "said": [str(each.message) for each in said], "exchanged": exchanged}


def rates_of_rank_0(door: str, adam: bool) -> dict[str, Any]:
    """Give all ranks rank 0's settings in mid-training, where the exchange has the momentum."""
    model = small_net.net()
    inner = torch.optim.AdamW(model.parameters(), 0.02) if adam else torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    run = Training(door, model, spec="topk:ratio=0.05", inner=inner, bucket_mb=0.015)
    run.train(3)
    run.optimizer.param_groups[0]["lr"] = 0.01 * (hvd.rank() + 1)
    before = run.residual()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        hvd.broadcast_optimizer_state(run.optimizer, 0)
        kept = all(torch.equal(left, before[name]) for name, left in run.residual().items())
        weights = run.train(3)
    rate = run.optimizer.param_groups[0]["lr"]
    return {"rate": rate, "kept": kept, "weights": weights, "said": [str(each.message) for each in said]}


def two_phases(door: str, spec: str) -> dict[str, Any]:
    """Train, forget the optimizer, and train the same model with another one, under the same names."""
    gc.collect()
    model, before = small_net.net(), len(steps._listeners)
    run = Training(door, model, spec, prefix=f"{door}.{spec}.", momentum=0.9)
    run.train(3)
    optimizer = weakref.ref(run.optimizer)
    del run
    gc.collect()
    found = {"dead": optimizer() is None, "listeners": len(steps._listeners) - before}
    run = Training(door, model, spec, prefix=f"{door}.{spec}.", momentum=0.9, lr=0.005)
    return found | {"weights": run.train(4)}


def program() -> dict[Any, Any]:
    found: dict[Any, Any] = dict(broadcast())
    found["resumed"] = {case: resumed_on_rank_0(*case) for case in RESUMED}
    for door, adam in itertools.product(DOORS, (False, True)):
        found[door, adam] = rates_of_rank_0(door, adam)
    for door in (ALONE, *DOORS):
        for spec in SPECS if door != ALONE else SPECS[:1]:
            found[door, spec] = two_phases(door, spec)
    return found


outcomes = ranks.once(lambda: ranks.launch(program, 2))


@pytest.mark.parametrize("door", DOORS)
def test_the_optimizers_own_state_is_the_stock_one(door: str) -> None:
    first, second = (found[door] for found in outcomes())
    for own in (first, second):
        assert own["keys"] == {"momentum_buffer"} and own["groups"][0] == own["groups"][1] and own["kept"]
    assert all(map(torch.equal, first["buffers"], second["buffers"]))
    assert not torch.equal(first["residual"], second["residual"])
    assert torch.equal(first["weights"], second["weights"])


@pytest.mark.parametrize("case", RESUMED, ids=str)
def test_rank_0_alone_loads_a_checkpoint_and_horovod_broadcasts_it(case: tuple[str, str, float]) -> None:
    """Steps without a gradient from Horovod, which some ranks take alone, exchange nothing."""
    first, second = (found["resumed"][case] for found in outcomes())
    assert torch.equal(first["weights"], second["weights"]) and first["weights"].isfinite().all()
    assert not first["said"] and not second["said"] and first["exchanged"] == second["exchanged"] == 0


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_settings_are_broadcast_where_the_exchange_has_the_momentum(door: str, adam: bool) -> None:
    first, second = (found[door, adam] for found in outcomes())
    for own in (first, second):
        assert own["rate"] == 0.01 and own["kept"] and not own["said"], own
    assert torch.equal(first["weights"], second["weights"])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("door", DOORS)
def test_an_optimizer_dies_and_another_one_trains_its_model_on(door: str, spec: str) -> None:
    """Rounding: Horovod's sums of two float32 gradients, and ours, divided in another order."""
    first, second = (found[door, spec] for found in outcomes())
    for own in (first, second):
        assert own["dead"] and own["listeners"] == 0
    assert torch.equal(first["weights"], second["weights"]) and first["weights"].isfinite().all()
    if spec == "dense":
        torch.testing.assert_close(first["weights"], outcomes()[0][ALONE, spec]["weights"], rtol=1e-5, atol=1e-7)
