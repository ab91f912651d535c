"""Local steps between sites: DistributedDataParallel within each, on four real ranks in two sites."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import join, launch, once
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

RANKS, EVERY, STEPS = 4, 4, 12
# Within a site, and between the sites.
SPECS = [("topk", "sign"), ("blocks", "topk:ratio=0.1; *.bias=dense")]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


class Spare(nn.Module):
    """The net with a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = net(), nn.Linear(8, 4)

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.used(given)
        return found


def batch(step: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def train(model: nn.Module, optimizer: Any, steps: range, factor: float = 1.0) -> list[list[Tensor]]:
    """Return all ranks' weights after each step."""
    found = []
    for step in steps:
        optimizer.zero_grad()
        (factor * model(batch(step)).square().mean()).backward()
        optimizer.step()
        own = torch.cat([each.detach().flatten() for each in model.parameters()])
        of_ranks = [torch.empty_like(own) for _ in range(RANKS)]
        dist.all_gather(of_ranks, own)
        found.append(of_ranks)
    return found


def refused(make: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, ValueError)) as found:
        make()
    return str(found.value)


def on_ranks() -> dict[str, Any]:
    join()
    rank, found = dist.get_rank(), {}
    site = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]  # not in the order of ranks

    def made(group: Any, spec: str = "dense", inner: str | None = None, **options: Any) -> tuple[Any, Any, Any]:
        model = DistributedDataParallel(net(), process_group=group)
        handle = gradcomp.ddp.attach(model, inner) if inner else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, handle, gradcomp.local.LocalSteps(model, optimizer, spec, **options)

    model, _, local = made(site, every=1, outer_lr=1, outer_momentum=0)
    found["mean"], found["bytes"] = train(model, local, range(STEPS)), local.stats()["bytes_sent"]
    model = DistributedDataParallel(net())
    found["ddp"] = train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), range(STEPS))
    for inner, spec in SPECS:
        model, handle, local = made(site, spec, inner, every=EVERY)
        found[spec] = train(model, local, range(STEPS))
        train(model, local, range(2))
        states = local.state_dict(), handle.state_dict()
        went_on = train(model, local, range(EVERY))
        model, handle, local = made(site, spec, inner, every=EVERY)
        local.load_state_dict(states[0])
        handle.load_state_dict(states[1])
        found[f"{spec} resumed"] = went_on, train(model, local, range(EVERY))
    before = train(model, local, range(2))[1]  # the end of a round
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the weights of some rank were not finite")
        after = train(model, local, range(EVERY), float("inf") if rank == 3 else 1.0)
    found["back"] = before, after[-1]
    model = DistributedDataParallel(Spare(), process_group=site, find_unused_parameters=True)
    local = gradcomp.local.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), "sign", every=EVERY)
    spare = model.module.spare.weight.detach().clone()
    train(model, local, range(3 * EVERY))
    waiting = local._fragments[0].session.resume.residual()
    has_any = {name.partition(".")[0] for name, each in waiting.items() if each.any()}
    found["spare"] = torch.equal(model.module.spare.weight, spare), has_any
    unequal = [dist.new_group([0, 1, 2]), dist.new_group([3])]
    found["unequal"] = refused(lambda: made(unequal[rank == 3]))
    found["whole"] = refused(lambda: made(None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        model = torch.compile(DistributedDataParallel(net()))
    found["compiled"] = refused(lambda: gradcomp.local.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    model = DistributedDataParallel(net(), process_group=site)
    given = model.module if rank == 3 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found["mixed"] = refused(lambda: gradcomp.local.LocalSteps(given, optimizer, "dense"))
    return found


@once
def launched() -> list[dict[str, Any]]:
    return launch(on_ranks, RANKS)


def test_sums_in_every_step_train_as_ddp_over_all_ranks() -> None:
    for rank in launched():
        for own, ddp in zip(rank["mean"], rank["ddp"], strict=True):
            torch.testing.assert_close(own, ddp, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", [spec for _, spec in SPECS])
def test_a_site_is_equal_after_every_step_and_all_ranks_after_a_synchronization(spec: str) -> None:
    for rank in launched():
        for step, (a, b, c, d) in enumerate(rank[spec], 1):
            assert torch.equal(a, c) and torch.equal(b, d)
            assert torch.equal(a, b) == (step % EVERY == 0)


@pytest.mark.parametrize("spec", [spec for _, spec in SPECS])
def test_sites_resume_to_the_bit(spec: str) -> None:
    for rank in launched():
        for went_on, resumed in zip(*rank[f"{spec} resumed"], strict=True):
            assert all(torch.equal(own, other) for own, other in zip(went_on, resumed, strict=True))


def test_each_rank_sends_its_part_between_the_sites() -> None:
    """A site of two ranks sends the model once."""
    entries = sum(each.numel() for each in net().parameters())
    for rank in launched():
        assert rank["bytes"] == 4 * entries // 2 + 4 * 16  # and the means and variances of eight channels


def test_a_site_that_is_not_finite_takes_all_back() -> None:
    for rank in launched():
        before, after = rank["back"]
        assert all(torch.equal(before[0], each) for each in [*before, *after])


def test_a_layer_that_rests_has_nothing_waiting() -> None:
    for rank in launched():
        assert rank["spare"] == (True, {"used"})


def test_wrong_groups_are_named() -> None:
    for rank in launched():
        assert "have 3, 1 ranks: make all the same size" in rank["unequal"]
        assert "exchanges gradients among all ranks in every step" in rank["whole"]
        assert rank["compiled"] == rank["whole"]
        assert "dense:by_host=true" in rank["mixed"]
