"""Local steps on real ranks, beside the outer step computed by hand, and what all ranks share after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import join, launch, once
from torch import Tensor, nn

import gradcomp
import gradcomp.local

RANKS, EVERY, ROUNDS = 3, 4, 3
RATE, MOMENTUM = 0.9, 0.7
# Specs that send everything, and the largest difference from the outer step by hand.
SPECS = {"dense": 1e-6, "topk:ratio=1,wire=exact": 1e-6, "blocks:bits=8": 3e-3}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 2))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items() if each.is_floating_point()}


def by_hand(seed: int = 0) -> dict[str, Tensor]:
    """Train the ranks one after the other, with an outer step of Nesterov momentum after each round."""
    torch.manual_seed(seed)
    models = [net() for _ in range(RANKS)]
    start = {n: each.detach().clone() for n, each in models[0].named_parameters()}
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    velocity = {n: torch.zeros_like(each) for n, each in start.items()}
    for number in range(ROUNDS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train(model, optimizer, rank, range(number * EVERY, (number + 1) * EVERY))
        for name in start:
            moved = torch.stack([start[name] - dict(model.named_parameters())[name].detach() for model in models]).mean(0)
            velocity[name] = MOMENTUM * velocity[name] + moved
            start[name] = start[name] - RATE * (moved + MOMENTUM * velocity[name])
        means = {
            n: torch.stack([dict(m.named_buffers())[n].float() for m in models]).mean(0) for n, _ in models[0].named_buffers()
        }
        for model in models:
            with torch.no_grad():
                for name, each in model.named_parameters():
                    each.copy_(start[name])
                for name, each in model.named_buffers():
                    if each.is_floating_point():
                        each.copy_(means[name])
    return state_of(models[0])


def on_ranks(door: str) -> dict[str, Any]:
    """Train by each spec; then save in mid-round, go on, and go on from the state."""
    rank = joined(door)
    found: dict[str, Any] = {}
    for spec in [*SPECS, "topk:ratio=0.1"]:
        torch.manual_seed(rank)  # the ranks begin apart
        model = net() if rank else (torch.manual_seed(0), net())[1]
        local = gradcomp.local.LocalSteps(model, torch.optim.AdamW(model.parameters(), lr=0.01), spec, every=EVERY)
        train(model, local, rank, range(ROUNDS * EVERY))
        found[spec] = state_of(model), dict(local.stats())
        if spec not in SPECS:  # what a rank has not sent stays in its weights
            waiting = local._fragments[0].session.resume.residual()
            whole = {name: each + waiting.get(name, 0.0) for name, each in state_of(model).items()}
            found["whole"] = whole, {"starts": local._fragments[0].state_dict()["starts"]}
    train(model, local, rank, range(50, 50 + EVERY + 1))
    saved = local.state_dict()
    train(model, local, rank, range(60, 60 + 2 * EVERY))
    again = net()
    other = gradcomp.local.LocalSteps(again, torch.optim.AdamW(again.parameters(), lr=0.01), spec, every=EVERY)
    other.load_state_dict(saved)
    train(again, other, rank, range(60, 60 + 2 * EVERY))
    found["resumed"] = state_of(model), state_of(again)
    for each in (local, other):
        each.flush()
        each.flush()
    found["flushed"] = state_of(model), dict(local.stats())
    return found


def joined(door: str) -> int:
    if door == "horovod":
        import horovod.torch as hvd

        hvd.init()
        return int(hvd.rank())
    join()
    return torch.distributed.get_rank()


@once
def launched(door: str) -> list[dict[str, Any]]:
    return launch(on_ranks, RANKS, door)


DOORS = pytest.mark.parametrize("door", ["torch", "horovod"])


@DOORS
@pytest.mark.parametrize("spec", SPECS)
def test_the_outer_step_is_the_one_by_hand(door: str, spec: str) -> None:
    wanted = by_hand()
    for rank in launched(door):
        found, _ = rank[spec]
        for name, each in wanted.items():
            assert (found[name] - each).abs().max() <= SPECS[spec] * max(1.0, float(each.abs().max())), name


@DOORS
def test_all_ranks_have_equal_weights_after_it(door: str) -> None:
    first, *others = launched(door)
    for key in [*SPECS, "flushed"]:
        for other in others:
            assert all(torch.equal(first[key][0][n], other[key][0][n]) for n in first[key][0]), key


@DOORS
def test_what_a_rank_has_not_sent_stays_in_its_weights(door: str) -> None:
    first, *others = launched(door)
    for rank in launched(door):
        whole, found = rank["whole"]
        for name, start in found["starts"].items():
            torch.testing.assert_close(whole[name], start, rtol=0, atol=1e-6)
    key = "topk:ratio=0.1"
    assert not any(torch.equal(first[key][0]["0.weight"], other[key][0]["0.weight"]) for other in others)


@DOORS
def test_most_steps_send_nothing(door: str) -> None:
    entries = sum(each.numel() for each in net().parameters())
    for rank in launched(door):
        stats = rank["dense"][1]
        assert (stats["steps"], stats["synchronizations"]) == (ROUNDS * EVERY, ROUNDS)
        sent = 4 * (entries + 18)  # with the running means and variances of nine channels
        assert stats["bytes_sent"] == sent and stats["bytes_sent_total"] == ROUNDS * sent
        assert stats["compression"] == EVERY * 4 * entries / sent
        assert rank["topk:ratio=0.1"][1]["compression"] > 2 * EVERY


@DOORS
def test_a_training_resumes_to_the_bit(door: str) -> None:
    for rank in launched(door):
        went_on, resumed = rank["resumed"]
        assert all(torch.equal(went_on[name], resumed[name]) for name in went_on)


@DOORS
def test_flush_synchronizes_once(door: str) -> None:
    for rank in launched(door):
        stats = rank["flushed"][1]
        assert stats["synchronizations"] == ROUNDS + 3 + 1
