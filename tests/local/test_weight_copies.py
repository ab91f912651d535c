"""Local steps and optimizers that keep copies of the weights: an exchange reaches the copies, or is warned of."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import join, launch, once
from torch import Tensor, nn

import gradcomp

EVERY = 4
TORCHS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "AdamW": {"amsgrad": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.001},
    **{kind: {} for kind in ("ASGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam")},
}


class Copying(torch.optim.SGD):
    """SGD with one more tensor in its state, under this name and by this rule."""

    def __init__(self, parameters: Any, name: str):
        super().__init__(parameters, lr=0.05)
        self.name = name

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            state, grad = self.state[weight], weight.grad.float()
            copy = state.setdefault(self.name, weight.detach().float().clone())
            if self.name in ("master", "kept"):  # computes the weights
                weight.copy_(copy.sub_(grad, alpha=0.05))
            elif self.name == "z":  # a schedule-free optimizer's: the weights follow it slowly
                weight.lerp_(copy.sub_(grad, alpha=0.05), 0.3)
            else:
                weight.sub_(grad, alpha=0.05)
                copy.lerp_(weight, 0.3)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def trained(optimizer_of: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Tensor, list[str]]:
    """Train past a synchronization by a step with no gradient; return what then is where, and the warnings."""
    torch.manual_seed(0)
    model, rank = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).to(dtype), dist.get_rank()
    optimizer = optimizer_of(model.parameters())
    local = gradcomp.local.LocalSteps(model, optimizer, "dense", every=EVERY, outer_lr=1.0, outer_momentum=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3 * EVERY):
            local.zero_grad()
            (model(batch(rank, step).to(dtype)) - rank).square().mean().backward()
            local.step()
    common = torch.cat([each.detach().float().flatten() for each in model.parameters()])
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    states = [{**optimizer.state[each]} for each in model.parameters()]
    optimizer.step()
    moved = torch.cat([each.detach().float().flatten() for each in model.parameters()]) - common
    return model, states, moved, [str(each.message) for each in caught]


def on_ranks() -> dict[str, Any]:
    join()
    found: dict[str, Any] = {}
    for name in ("master", "kept", "z", "slow_buffer", "ema"):
        dtype = torch.bfloat16 if name == "master" else torch.float32
        model, states, moved, said = trained(lambda every, name=name: Copying(every, name), dtype)
        apart = max(float((s[name] - p.detach().float()).abs().max()) for s, p in zip(states, model.parameters(), strict=True))
        found[name] = float(moved.abs().max()), apart, said
    for kind, options in TORCHS.items():
        _, _, moved, said = trained(lambda every, kind=kind, options=options: getattr(torch.optim, kind)(every, **options))
        found[kind] = bool(moved.isfinite().all()), said
    return found


@once
def launched() -> list[dict[str, Any]]:
    return launch(on_ranks, 2)


@pytest.mark.parametrize("name,dtype", [("master", torch.bfloat16), ("kept", torch.float32)])
def test_a_step_after_an_exchange_does_not_undo_it(name: str, dtype: torch.dtype) -> None:
    """Known by its name in bfloat16, by its values in float32. A step without a gradient moves weights by rounding."""
    for rank in launched():
        moved, _, said = rank[name]
        assert moved <= torch.finfo(dtype).eps and not said


def test_what_leads_the_weights_moves_with_them_and_is_warned_of() -> None:
    """Left behind, z draws the weights back by 0.3 of the ranks' distance, here 0.05 and more."""
    for rank in launched():
        moved, apart, said = rank["z"]
        assert apart < 0.3 and moved < 0.09
        assert len(said) == 1 and "Copying keeps 'z' of the weights' shape" in said[0] and "blocks over DDP" in said[0]


def test_averages_stay_and_unknown_ones_are_warned_of() -> None:
    for rank in launched():
        assert rank["ema"][1] > 0.01 and rank["ema"][2] == []
        assert rank["slow_buffer"][1] > 0.01 and "Copying keeps 'slow_buffer'" in rank["slow_buffer"][2][0]


@pytest.mark.parametrize("kind", TORCHS)
def test_torchs_optimizers_are_known(kind: str) -> None:
    for rank in launched():
        assert rank[kind] == (True, [])
