"""Local steps in trouble: gradients that are not finite, a GradScaler, 16-bit weights, unlike ranks, replaced buffers."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import join, launch, once
from torch import Tensor, nn

import gradcomp


def steps(model: nn.Module, slopes: list[float], spec: str = "dense", scaler: Any = None, **options: Any) -> Any:
    """Step with gradients that are these slopes everywhere; clip=True unscales before."""
    clips = options.pop("clip", False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = gradcomp.local.LocalSteps(model, optimizer, spec, **{"outer_lr": 1.0, "outer_momentum": 0.0, **options})
    for slope in slopes:
        local.zero_grad()
        loss = sum(slope * each.sum() for each in model.parameters())
        (loss if scaler is None else scaler.scale(loss)).backward()
        if clips:
            scaler.unscale_(optimizer)
        if scaler is None:
            local.step()
        else:
            scaler.step(local)
            scaler.update()
    return local


def one() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def caught(call: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        return call(), [str(each.message) for each in seen]


def trouble() -> dict[str, Any]:
    join()
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for spec in ("dense", "topk:ratio=1,wire=exact,momentum=0"):
        model, slopes = one(), [1.0, 1.0, math.nan if rank else 1.0, 1.0, 1.0, 1.0]
        _, said = caught(lambda model=model, slopes=slopes, spec=spec: steps(model, slopes, spec, every=2))
        found[f"nan {spec}"] = model.weight.item(), said
    model = one()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    local = steps(model, [1.0] * 5 + [math.inf if rank else 1.0] + [1.0] * 3, every=4, scaler=scaler)
    local.flush()
    found["scaler"] = model.weight.item(), local.stats()["steps"], local.stats()["synchronizations"]
    model = one()
    steps(model, [1.0] * 4, every=4, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0), clip=True)
    found["unscaled"] = model.weight.item()
    model = one().bfloat16()
    local = gradcomp.local.LocalSteps(
        model, torch.optim.SGD(model.parameters(), lr=1.0), "dense", every=1, outer_lr=0.4, outer_momentum=0.0
    )
    for _ in range(30):
        local.zero_grad()
        (0.00390625 * model.weight.sum() * (1 - rank)).backward()
        local.step()
    found["bfloat16"] = model.weight.item()
    try:
        steps(one(), [], outer_lr=0.9 if rank else 0.7)
    except ValueError as error:
        found["other rate"] = str(error)
    model = nn.Sequential(one(), one())
    model[0].weight.requires_grad_(False)
    model[0].weight.fill_(float(rank))
    local = steps(model, [1.0], every=2)
    found["frozen"] = model[0].weight.item()
    model[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError) as refused:
        local.step()
    found["unfrozen"] = str(refused.value)
    model = nn.Sequential(one(), one())
    for optimizer in (torch.optim.SGD(model[0].parameters()), torch.optim.SGD([*model.parameters(), *one().parameters()])):
        with pytest.raises(RuntimeError, match="different parameters that are trained"):
            gradcomp.local.LocalSteps(model, optimizer, "dense")
    return found | buffers(rank) | loaded(rank) | loaded_before(rank)


class Ema(nn.Linear):
    """A layer that puts a new tensor in its buffer's place, as averages of weights do."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        nn.init.ones_(self.weight)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = torch.full((4,), float(dist.get_rank()))
        return super().forward(x)


def buffers(rank: int) -> dict[str, Any]:
    model = Ema()
    local = steps(model, [1.0], every=2)
    model(torch.ones(1, 1))
    local.step()
    return {"buffers": model.mean.tolist(), "bytes": local.stats()["bytes_sent"]}


def loaded(rank: int) -> dict[str, Any]:
    model = one()
    local = steps(model, [float(rank)] * 2, every=2, outer_momentum=0.9)
    saved, before = local.state_dict(), model.weight.item()
    other = one()
    again = steps(other, [], every=2, outer_lr=0.5, outer_momentum=0.9)
    again.load_state_dict(saved)
    again.flush()  # nothing moved
    found: dict[str, Any] = {"after": (before, other.weight.item()), "rate": again._fragments[0]._outer.param_groups[0]["lr"]}
    try:
        steps(one(), [], every=4).load_state_dict(saved)
    except ValueError as error:
        found["other every"] = str(error)
    return found


def loaded_before(rank: int) -> dict[str, Any]:
    """Load weights after LocalSteps() was made: on all ranks, on one of them, and beside steps that it did not take."""
    found = {}
    for who in ("all", "the second", "stepped"):
        model = one()
        local = steps(model, [], every=2, outer_lr=0.9, outer_momentum=0.7)
        if who == "stepped":
            model.weight.grad = torch.full((1, 1), 10.0 * rank)
            local._optimizer.step()
        elif who == "all" or rank:
            model.load_state_dict({"weight": torch.full((1, 1), 5.0)})
        for _ in range(2):
            local.zero_grad()
            model.weight.sum().backward()
            local.step()
        found[f"loaded by {who}"] = model.weight.item()
    model = one()
    local = steps(model, [], every=2)
    model.load_state_dict({"weight": torch.full((1, 1), 5.0)})
    if rank:  # one rank has a batch, and the other none
        local.zero_grad()
        model.weight.sum().backward()
        local.step()
    local.flush()
    found["flushed"] = model.weight.item()
    return found


@once
def launched() -> list[dict[str, Any]]:
    return launch(trouble, 2)


@pytest.mark.parametrize("spec,ends", [("dense", 0.6), ("topk:ratio=1,wire=exact,momentum=0", 0.5)])
def test_a_round_that_is_not_finite_is_lost_on_all_ranks(spec: str, ends: float) -> None:
    """A residual keeps the progress of the rank whose weights were finite: it comes with the next round's."""
    for rank in launched():
        weight, _ = rank[f"nan {spec}"]
        assert weight == pytest.approx(ends)
    assert any("weights of some rank were not finite" in text for text in launched()[0][f"nan {spec}"][1])


def test_steps_that_a_scaler_skips_are_counted() -> None:
    """Rank 1 skips one of nine steps: the mean over ranks is of nine and eight."""
    for rank in launched():
        weight, count, synchronizations = rank["scaler"]
        assert (count, synchronizations) == (9, 3) and weight == pytest.approx(1 - 0.85, abs=1e-3)


def test_gradients_are_unscaled_once() -> None:
    for rank in launched():
        assert rank["unscaled"] == pytest.approx(1 - 0.4, abs=1e-5)


def test_small_progress_of_16_bit_weights_adds_up() -> None:
    """One rank of two moves an ulp in each round, and the outer rate is 0.4."""
    for rank in launched():
        assert rank["bfloat16"] == pytest.approx(1 - 30 * 0.4 * 0.00390625 / 2, abs=0.01)


def test_unlike_ranks_are_told() -> None:
    for rank in launched():
        assert "local steps: rank 0 has 'every=30, outer_lr=0.7" in rank["other rate"]


def test_frozen_weights_are_rank_0s_and_unfrozen_ones_are_refused() -> None:
    for rank in launched():
        assert rank["frozen"] == 0.0 and "such as '0.weight'" in rank["unfrozen"]


def test_buffers_that_are_replaced_become_means() -> None:
    for rank in launched():
        assert rank["buffers"] == [0.5] * 4 and rank["bytes"] == 4 * (1 + 4)


def test_a_state_is_loaded_as_it_was() -> None:
    for rank in launched():
        before, after = rank["after"]
        assert before == after and rank["rate"] == 0.5
        assert "the state has every=2" in rank["other every"]


def test_weights_that_are_loaded_before_the_first_step_are_a_start() -> None:
    """They would count as progress, which the outer step makes larger. Those of steps do."""
    outer = 0.9 * (1 + 0.7)
    for found in launched():
        assert found["loaded by all"] == pytest.approx(5 - outer * 0.2)
        assert found["loaded by the second"] == pytest.approx(1 - outer * 0.2)
        assert found["loaded by stepped"] == pytest.approx(1 - outer * (0.2 + 0.5))
        assert found["flushed"] == pytest.approx(5 - 0.05)
