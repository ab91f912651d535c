"""DDP where something goes wrong: an overflow, a layer that no rank uses, ranks that differ, and calls that are refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import ranks
import small_net
import torch
import torch.distributed as dist
from ddp_run import ALONE, SPARSE, DdpRun
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.slow


def unused_everywhere() -> tuple[Tensor, Tensor]:
    """A layer that no rank uses in a step goes on with what was left of it: what it came to, and what it would have had to."""
    run = DdpRun("topk:ratio=0.05,wire=exact", find_unused_parameters=True)
    run.train(3)
    left = copy.deepcopy(run.handle.residual()["part.weight"])
    before = run.plain.part.weight.detach().clone()
    for step in range(4):
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        run.backward(skip=True)
        run.optimizer.step()
    kept = run.handle.residual()["part.weight"].view_as(before)
    went = left.view_as(before) - kept
    dist.all_reduce(went)
    return (before - run.plain.part.weight.detach()) / 0.02, went / dist.get_world_size()


def overflow(value: float) -> dict[str, Any]:
    """In one step a gradient of rank 1 is not finite: all ranks see it, and skip the step."""
    run = DdpRun(SPARSE)
    run.train(3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weights = run.weights
    spoiled = run.plain.last.weight.register_hook(lambda g: g * (value if dist.get_rank() == 1 else 1))
    run.optimizer.zero_grad()
    x, y = next(run.data)
    scaler.scale(nn.functional.cross_entropy(run.whole(x), y)).backward()
    scaler.step(run.optimizer)
    scaler.update()
    spoiled.remove()
    kept = run.handle.residual().values()
    return {
        "skipped": torch.equal(weights, run.weights),
        "kept finite": all(bool(part.isfinite().all()) for part in kept),
        "scale": scaler.get_scale(),
        "weights": run.train(3),
    }


def disagreement() -> tuple[str, Tensor]:
    """After a refusal a different spec can be attached."""
    run = DdpRun(ALONE)
    refused = small_net.refused(lambda: gradcomp.ddp.attach(run.whole, "topk:ratio=0.1" if dist.get_rank() == 1 else SPARSE))
    gradcomp.ddp.attach(run.whole, SPARSE)
    return refused, run.train(5)


def embedded() -> str:
    layers = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3))
    run = DdpRun(SPARSE, layers)
    return small_net.refused(lambda: run.whole(torch.tensor([dist.get_rank(), 3])).sum().backward())


def without_ddp() -> str:
    return small_net.refused(lambda: gradcomp.ddp.attach(small_net.net(), SPARSE))  # type: ignore[arg-type]


def twice() -> str:
    run = DdpRun(SPARSE)
    return small_net.refused(lambda: gradcomp.ddp.attach(run.whole, SPARSE))


def compiled() -> str:
    run = DdpRun(ALONE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on importing its compiler
        whole: Any = torch.compile(run.whole)
    return small_net.refused(lambda: gradcomp.ddp.attach(whole, SPARSE))


def another_optimizer() -> str:
    run = DdpRun(ALONE)
    other = torch.optim.SGD(small_net.net().parameters(), 0.1)
    return small_net.refused(lambda: gradcomp.ddp.attach(run.whole, SPARSE, optimizer=other))


def unfrozen_later() -> str:
    layers = small_net.net()
    layers.first.weight.requires_grad_(False)
    run = DdpRun(SPARSE, layers)
    run.train(2)
    layers.first.weight.requires_grad_(True)
    return small_net.refused(lambda: run.train(1))


def unknown_momentum() -> str:
    """Without the optimizer, two momenta are found at the first step; with it, at once."""
    refused = []
    for known in (False, True):
        whole = DistributedDataParallel(small_net.net())
        optimizer = torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9)
        given = optimizer if known else None

        def use(whole: Any = whole, optimizer: Any = optimizer, given: Any = given) -> None:
            gradcomp.ddp.attach(whole, "topk:momentum=0.9", optimizer=given)
            whole(torch.ones(2, 20)).sum().backward()
            optimizer.step()

        refused.append(small_net.refused(use))
    return " ".join(refused)


CASES = (
    unused_everywhere,
    disagreement,
    embedded,
    without_ddp,
    twice,
    compiled,
    another_optimizer,
    unfrozen_later,
    unknown_momentum,
)


def program() -> dict[Any, Any]:
    """Try one case after the other."""
    ranks.join()
    found: dict[Any, Any] = {("overflow", str(value)): overflow(value) for value in (float("inf"), float("nan"))}
    for case in CASES:
        found[case.__name__] = case()
    return found


@ranks.once
def found(count: int) -> list[dict[Any, Any]]:
    return ranks.launch(program, count)


@pytest.mark.parametrize("count", [2, 3])
def test_the_residual_of_an_unused_layer_still_arrives(count: int) -> None:
    """DDP itself would drop it. Rounding: a sum of five float32 steps against one difference."""
    for own in found(count):
        came, expected = own["unused_everywhere"]
        assert came.abs().sum() > 0
        torch.testing.assert_close(came, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_an_overflow_on_one_rank_is_seen_by_all_and_not_kept(value: str) -> None:
    for own in found(3):
        case = own["overflow", value]
        assert case["skipped"] and case["kept finite"] and case["scale"] == 2
        assert torch.equal(case["weights"], found(3)[0]["overflow", value]["weights"])


def test_a_spec_that_is_another_on_one_rank_is_refused_on_all() -> None:
    for own in found(3):
        refused, weights = own["disagreement"]
        assert "spec: rank 0 has 'topk:ratio=0.05', rank 1 has 'topk:ratio=0.1'" in refused
        assert torch.equal(weights, found(3)[0]["disagreement"][1])


def test_impossible_requests_are_refused_by_name() -> None:
    for own in found(2):
        assert own["without_ddp"].startswith("TypeError: attach() got a Net; wrap the model in DistributedDataParallel")
        assert own["embedded"].startswith("ValueError: sparse gradients")
        assert own["twice"].startswith("RuntimeError: the model has a communication hook already; keep the handle of the first")
        assert own["compiled"].endswith("torch.compile() has wrapped; call attach() before torch.compile()")
        assert own["another_optimizer"].startswith("ValueError: optimizer= has none of the model's parameters; pass the")
        assert own["unfrozen_later"].startswith("RuntimeError: 'first.weight' of shape (70, 20) was unfrozen or added after")
        assert own["unknown_momentum"].count("would act twice") == 2
