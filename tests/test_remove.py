"""handle.remove(): what waits is delivered once, and DDP, FSDP2 and Horovod then train as if gradcomp had never been there."""

from __future__ import annotations

import copy
import gc
import weakref
from datetime import timedelta
from typing import Any

import fsdp_models
import pytest
import small_net
import torch
import torch.distributed as dist
from doors import ALONE, COMPRESSION, DDP, OWN, Training, join
from ranks import end_together, launch, report
from torch import Tensor, nn

import gradcomp
from gradcomp.integrations import common

pytestmark = pytest.mark.slow

GONE = "RuntimeError: remove() has ended this exchange, and the model trains as without gradcomp"


def under_ranks(door: str, spec: str) -> dict[str, Any]:
    """Train, remove the exchange, and train on beside a twin that never had one."""
    join(door)
    run = Training(door, spec=spec, momentum=0.9)
    run.train(4)
    before, left = run.weights, small_net_order(run)
    run.handle.remove()
    run.handle.remove()
    found: dict[str, Any] = {"before": before, "left": left, "after": run.weights}
    found["gone"] = [
        small_net.refused(act) for act in (run.handle.stats, run.handle.state_dict, lambda: run.handle.change("topk"))
    ]
    found["repr"], found["figures"] = repr(run.handle), common.figures(run.handle)
    plain = Training(ALONE if door in (COMPRESSION, OWN) else DDP, momentum=0.9)
    plain.model.load_state_dict(run.model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    batches = [next(run.data) for _ in range(5)]
    run.data, plain.data = iter(batches), iter(batches)
    found["wanted"], found["came"] = plain.train(5), run.train(5)
    if door == DDP:
        run.data = small_net.examples(dist.get_rank(), 1)
        again = gradcomp.ddp.attach(run.whole, spec, bucket_cap_mb=25)
        run.train(3)
        found["again"], found["weights"] = dict(again.stats()), run.weights
        again.remove()
        found["removed again"] = run.train(2)
    return found


def small_net_order(run: Training) -> Tensor:
    """Return the residual as weights() returns the weights."""
    residual = run.residual()
    return torch.cat([residual[name].flatten() for name, _ in run.model.named_parameters()])


@pytest.mark.parametrize("door", [DDP, COMPRESSION, OWN])
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "blocks", "auto"])
def test_a_training_goes_on_as_without_gradcomp(door: str, spec: str) -> None:
    one, other = launch(under_ranks, 2, door, spec)
    wanted = one["before"] - (one["left"] + other["left"]) / 2
    torch.testing.assert_close(one["after"], wanted, rtol=0, atol=1e-6)
    assert bool(one["left"].any()) == (spec == "topk:ratio=0.05")
    for key in ("after", "came", *(["weights", "removed again"] if door == DDP else [])):
        assert torch.equal(one[key], other[key]), key
    torch.testing.assert_close(one["came"], one["wanted"], rtol=1e-5, atol=1e-6)
    assert all(said.startswith(GONE) for said in one["gone"]) and not one["figures"]
    assert one["repr"].endswith("of 'nothing, since remove()'>")
    if door == DDP:
        assert one["again"]["steps"] == 3 and ("updates" in one["again"]["exchanges"]) == spec.startswith("topk")


def alone() -> None:
    """Rank 0 removes the exchange: in the middle of a step; while rank 1 changes the spec; and while it trains on."""
    join(DDP)
    run = Training(DDP, spec="topk:ratio=0.05")
    run.train(2)
    first, phases = dist.get_rank() == 0, run.handle._session.phases
    phases.note("a gradient")
    refused = small_net.refused(run.handle.remove)
    assert refused.startswith("RuntimeError: remove() came in the middle of a step"), refused
    phases.note("the end of a step")
    said = [small_net.refused(run.handle.remove if first else lambda: run.handle.change("dense"))]
    said.append(str(bool(run.train(2).isfinite().all())))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    said.append(small_net.refused(run.handle.remove if first else lambda: run.train(1)))
    report([*said, run.handle._session.spec])
    end_together()  # the group has operations under way


def test_a_rank_that_removes_alone_is_told_so() -> None:
    one, other = launch(alone, 2)
    assert (
        one[0] == other[0] and "make these equal on all ranks: remove(): rank 0 has 'called', rank 1 has 'not called'" in one[0]
    )
    assert one[1] == other[1] == "True", "the exchange goes on as before"
    assert one[2].startswith(
        "RuntimeError: ranks 1 have not come to the meeting that all ranks call within the group's timeout"
    )
    assert one[3] == "topk:ratio=0.05" and other[2].startswith("RuntimeError: ")


def odd_programs() -> dict[str, Any]:
    """An embedding with sparse gradients, layers without any, and an optimizer that has not stepped yet.

    A twin never had an exchange. A third model has its own removed between the first backward pass and the step.
    """
    join(DDP)
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(9, 4, sparse=True), "out": nn.Linear(4, 2), "idle": nn.Linear(3, 3)})
    models = model, copy.deepcopy(model), copy.deepcopy(model)
    wrapped = [nn.parallel.DistributedDataParallel(_Words(each), find_unused_parameters=True) for each in models]
    gradcomp.ddp.attach(wrapped[0], "topk:ratio=0.5").remove()
    late = gradcomp.ddp.attach(wrapped[2], "topk:ratio=0.5")
    for each, of in zip(wrapped, models, strict=True):
        optimizer = torch.optim.SGD(of.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            each(torch.tensor([step, dist.get_rank()])).square().sum().backward()
            if of is models[2] and not step:
                late.remove()
            optimizer.step()
    return dict(zip(("came", "wanted", "late"), map(small_net.weights, models), strict=True))


class _Words(nn.Module):
    def __init__(self, parts: nn.ModuleDict):
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["out"](self.parts["words"](x))


def test_ddp_then_takes_sparse_gradients_and_unused_layers() -> None:
    one, other = launch(odd_programs, 2)
    for key in ("came", "late"):
        assert torch.equal(one[key], other[key]), key
        torch.testing.assert_close(one[key], one["wanted"])


def at_odd_times() -> dict[str, Any]:
    """Remove an exchange between the first backward pass and its step; load a state of each rank's own afterwards; and remove
    the exchange of one of two models that share a layer.
    """
    join(DDP)
    found = dict[str, Any]()
    run, plain = (Training(DDP, spec=spec, momentum=0.9) for spec in ("topk:ratio=0.05", None))
    plain.data = iter(batches := [next(run.data)])
    run.data = iter(batches)
    run.backward()
    run.handle.remove()
    run.optimizer.step()
    found["first came"], found["first wanted"] = run.weights, plain.train(1)
    run = Training(DDP, spec="topk:ratio=0.05")
    run.optimizer = torch.optim.AdamW(run.model.parameters(), 0.01)
    run.train(4)
    kept = copy.deepcopy(run.optimizer.state_dict())
    bucket = weakref.ref(run.handle._session.reducer.buckets[0])
    run.handle.remove()
    gc.collect()
    found["has memory"] = bucket() is not None
    run.train(2)
    run.optimizer.load_state_dict(kept)
    found["loaded"] = run.train(2)
    for how in ("remove", "change"):
        models = [small_net.net(seed) for seed in (1, 2)]
        models[1].first = models[0].first
        runs = [Training(DDP, each, "topk:ratio=0.05") for each in models]
        for each in (*runs, *runs):
            each.train(1)
        runs[1].handle.remove() if how == "remove" else runs[1].handle.change("blocks")
        for each in (*runs, *runs):
            each.train(1)
        found[f"shared, {how}"] = torch.cat([each.weights for each in runs])
    return found


def test_an_exchange_ends_at_odd_times() -> None:
    one, other = launch(at_odd_times, 2)
    for key in ("first came", "loaded", "shared, remove", "shared, change"):
        assert torch.equal(one[key], other[key]), key
    torch.testing.assert_close(one["first came"], one["first wanted"])
    assert not one["has memory"]


def over_shards(kind: str, spec: str, weights: str | None) -> dict[str, Any]:
    """The same over FSDP2, whose twin has been wrapped anew."""
    join(DDP)
    mesh = fsdp_models.mesh_of(kind)
    model = fsdp_models.wrapped(kind, fsdp_models.net(), mesh)
    handle = gradcomp.fsdp.attach(model, spec, weights=weights)
    fsdp_models.train(model, 3)
    handle.remove()
    handle.remove()
    plain = fsdp_models.wrapped(kind, fsdp_models.net(1), mesh)
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        fsdp_models.train(each, 3)
    found = {"came": fsdp_models.shards_of(model), "wanted": fsdp_models.shards_of(plain)}
    again = gradcomp.fsdp.attach(model, spec, weights=weights)
    fsdp_models.train(model, 2)
    return {**found, "again": again.stats()["steps"], "gone": small_net.refused(handle.stats)}


@pytest.mark.parametrize(
    "kind,spec,weights",
    [("shards", "blocks", "blocks:bits=8"), ("two by two", "topk:ratio=0.1", None), ("replicate", "topk:ratio=0.1", None)],
)
def test_fsdp2_goes_on_as_without_gradcomp(kind: str, spec: str, weights: str | None) -> None:
    for own in launch(over_shards, 4, kind, spec, weights):
        assert own["gone"].startswith(GONE) and own["again"] == 2
        for name, wanted in own["wanted"].items():
            torch.testing.assert_close(own["came"][name], wanted, rtol=1e-4, atol=1e-6)


def hidden() -> str:
    join(DDP)
    _, handle, _ = fsdp_models.attached(fsdp_models.HIDDEN, "topk:ratio=0.1")
    return small_net.refused(handle.remove)


def test_replicas_that_fsdp2_does_not_know_keep_their_exchange() -> None:
    assert all("would leave the replicas without an exchange" in said for said in launch(hidden, 4))
