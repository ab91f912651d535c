"""Buffers under local steps: those that changed become their means, go back with the weights, and are saved."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from ranks import join, launch, once
from torch import Tensor, nn

import gradcomp

EVERY = 4
TABLE = [2.0**40 + 1, 1 / 3]


class Net(nn.Module):
    """A causal mask, constants in float64, counts, a statistic in float64, and a table that grows with the longest input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("table", torch.tensor(TABLE, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("eighth", torch.ones(2).to(torch.float8_e4m3fn))
        self.register_buffer("grown", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.grown):
            self.grown = torch.arange(len(x)).float()
        self.mean.fill_(2.0**40 + dist.get_rank())
        return self.norm(self.linear(x))


def made(**options: Any) -> tuple[Net, gradcomp.local.LocalSteps]:
    torch.manual_seed(dist.get_rank())
    model = Net()
    with torch.no_grad():
        model.norm.num_batches_tracked.fill_(7 * dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, gradcomp.local.LocalSteps(model, optimizer, "dense", every=EVERY, **options)


def train(
    model: Net, local: gradcomp.local.LocalSteps, steps: range, poison: int = -1, sizes: tuple[int, int] = (6, 6)
) -> None:
    rank = dist.get_rank()
    for step in steps:
        local.zero_grad()
        x = torch.randn(sizes[rank], 3, generator=torch.Generator().manual_seed(10 * step + rank))
        (model(x * math.nan if step == poison and rank else x) - 1).square().mean().backward()
        local.step()


def copied(model: Net) -> dict[str, Tensor]:
    every = (*model.named_parameters(), *model.named_buffers())
    return {name: each.detach().clone() for name, each in every if name != "eighth"}


def on_ranks() -> dict[str, Any]:
    join()
    found: dict[str, Any] = {}
    for fragments in (1, 2):
        model, local = made(fragments=fragments)
        begun = int(model.norm.num_batches_tracked)
        train(model, local, range(3 * EVERY))
        local.flush()
        found[f"{fragments}"] = copied(model), local.stats()["bytes_sent"], begun
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before = copied(model)
            train(model, local, range(20, 20 + EVERY), poison=21)
            local.state_dict()  # ends what is under way
            found[f"{fragments} went back"] = before, copied(model)
            train(model, local, range(24, 24 + 2 * EVERY))
        local.flush()
        found[f"{fragments} poisoned"] = copied(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, local, range(40, 40 + 2 * EVERY), sizes=(7, 12))
        found[f"{fragments} unlike"] = tuple(model.grown.shape), [str(each.message)[:70] for each in caught]
        train(model, local, range(50, 53))
        saved = local.state_dict()
        again, other = made(fragments=fragments)
        other.load_state_dict(saved)
        for each in ((model, local), (again, other)):
            train(*each, range(53, 53 + 2 * EVERY))
        found[f"{fragments} resumed"] = copied(model), copied(again)
    return found


@once
def launched() -> list[dict[str, Any]]:
    return launch(on_ranks, 2)


def test_those_that_changed_become_means_in_their_own_types() -> None:
    first, second = (rank["1"] for rank in launched())
    for name in ("norm.running_mean", "norm.running_var", "mask", "table", "mean"):
        assert torch.equal(first[0][name], second[0][name]), name
    assert first[0]["mean"].tolist() == [2.0**40 + 0.5] and first[0]["table"].tolist() == TABLE


def test_a_mask_and_constants_stay_and_cost_nothing() -> None:
    for fragments in ("1", "2"):
        for rank in launched():
            buffers, sent, _ = rank[fragments]
            assert torch.equal(buffers["mask"], torch.full((4, 4), -math.inf).triu(1))
            parameters = 9 + 3 + 3 + 3 if fragments == "1" else sent // 4  # a fragment has a part
            assert sent == 4 * parameters + ((6 + 2) * 4 if fragments == "1" else 0)


def test_integers_begin_as_rank_0s_and_are_each_ranks_own() -> None:
    for rank in launched():
        buffers, _, begun = rank["1"]
        assert begun == 0 and int(buffers["norm.num_batches_tracked"]) == 3 * EVERY


def test_a_batch_that_is_not_finite_spoils_no_statistics() -> None:
    for fragments in ("1", "2"):
        first, second = (rank[f"{fragments} poisoned"] for rank in launched())
        for name in ("norm.running_mean", "norm.running_var", "linear.weight"):
            assert all(torch.equal(*(each[name] for each in rank[f"{fragments} went back"])) for rank in launched()), name
            assert first[name].isfinite().all() and torch.equal(first[name], second[name]), name


def test_buffers_of_unlike_sizes_stay_each_ranks_own() -> None:
    for fragments in ("1", "2"):
        for rank, size in zip(launched(), (7, 12), strict=True):
            shape, said = rank[f"{fragments} unlike"]
            assert shape == (size,) and len(said) == 1 and "the buffer 'grown' has another shape" in said[0]


def test_all_are_saved_and_a_table_that_has_grown_does_no_harm() -> None:
    for fragments in ("1", "2"):
        for rank in launched():
            went_on, resumed = rank[f"{fragments} resumed"]
            assert [name for name in went_on if name != "grown" and not torch.equal(went_on[name], resumed[name])] == []
