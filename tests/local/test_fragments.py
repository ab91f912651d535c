"""Fragments of local steps: exchanged in turn, applied when the next begins, beside a computation by hand."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from ranks import join, launch, once
from torch import Tensor, nn

import gradcomp

RANKS, EVERY, STEPS, RATE, MOMENTUM = 2, 4, 11, 0.8, 0.5
# The layers of the two fragments.
PARTS = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def inner(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + step))
    optimizer.zero_grad()
    (model(batch) - rank).square().mean().backward()
    optimizer.step()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


@torch.no_grad()
def by_hand() -> list[dict[str, Tensor]]:
    """Return each rank's weights after all steps."""
    models = [net() for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    named = [dict(model.named_parameters()) for model in models]
    start = weights_of(models[0])
    velocity = {name: torch.zeros_like(each) for name, each in start.items()}
    under_way: tuple[list[str], list[dict[str, Tensor]], dict[str, Tensor]] | None = None
    for step in range(1, STEPS + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            with torch.enable_grad():
                inner(model, optimizer, rank, step)
        if step % (EVERY // 2):
            continue
        if under_way is not None:
            names, sent, means = under_way
            for name in names:
                velocity[name] = MOMENTUM * velocity[name] + means[name]
                start[name] = start[name] - RATE * (means[name] + MOMENTUM * velocity[name])
                for own, before in zip(named, sent, strict=True):
                    own[name].copy_(start[name] + own[name] - before[name])
        names = PARTS[(step // (EVERY // 2) - 1) % 2]
        sent = [{name: own[name].clone() for name in names} for own in named]
        under_way = names, sent, {name: torch.stack([start[name] - each[name] for each in sent]).mean(0) for name in names}
    return [weights_of(model) for model in models]


def on_ranks() -> dict[str, Any]:
    join()
    rank, model = dist.get_rank(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"every": EVERY, "outer_lr": RATE, "outer_momentum": MOMENTUM, "fragments": 2}
    local = gradcomp.local.LocalSteps(model, optimizer, "dense", **options)
    for step in range(1, STEPS + 1):
        inner(model, local, rank, step)
    found: dict[str, Any] = {"weights": weights_of(model), "stats": local.stats()}
    saved = local.state_dict()
    again = net()
    other = gradcomp.local.LocalSteps(again, torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9), "dense", **options)
    other.load_state_dict(saved)
    for step in range(STEPS + 1, STEPS + 8):
        inner(model, local, rank, step)
        inner(again, other, rank, step)
    found["resumed"] = [weights_of(model), weights_of(again)]
    local.flush()
    sent = local.stats()["bytes_sent_total"]
    local.flush()
    assert local.stats()["bytes_sent_total"] == sent
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for spec in ("topk:ratio=0.2; 2.*=dense", "topk:ratio=0.2; *.scale=dense"):
            more = net()
            gradcomp.local.LocalSteps(more, torch.optim.SGD(more.parameters(), lr=0.1), spec, **options)
            found[spec] = [str(each.message) for each in said]
    return {**found, "flushed": weights_of(model)}


@once
def launched() -> list[dict[str, Any]]:
    return launch(on_ranks, RANKS)


def test_fragments_are_applied_when_the_next_begins() -> None:
    for own, wanted in zip(launched(), by_hand(), strict=True):
        for name, each in wanted.items():
            torch.testing.assert_close(own["weights"][name], each, atol=1e-6, rtol=1e-5)


def test_each_fragment_sends_its_own_entries() -> None:
    for rank in launched():
        assert rank["stats"]["bytes_sent"] == 4 * 42 and rank["stats"]["bytes_sent_total"] == 4 * 42 * 4
        assert rank["stats"]["synchronizations"] == 2


def test_a_training_resumes_from_the_middle_of_an_exchange() -> None:
    for rank in launched():
        went_on, resumed = rank["resumed"]
        assert all(torch.equal(went_on[name], resumed[name]) for name in went_on)


def test_a_rule_is_for_the_layers_of_all_fragments() -> None:
    for rank in launched():
        assert not rank["topk:ratio=0.2; 2.*=dense"]
        assert "has a name like '*.scale'; they are 0.weight, 0.bias, 2.weight" in rank["topk:ratio=0.2; *.scale=dense"][0]


def test_all_ranks_are_equal_after_flush() -> None:
    first, second = launched()
    assert all(torch.equal(first["flushed"][name], second["flushed"][name]) for name in first["flushed"])
