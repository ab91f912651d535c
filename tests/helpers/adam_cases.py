"""Trainings with Adam's kind in the simulator, beside torch's own: settings, gradients, steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, NAdam, Optimizer

import gradcomp

STEPS = 12
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (Adam, {}),
    "adamw": (AdamW, {"weight_decay": 0.1}),
    "betas": (AdamW, {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.05}),
    "maximize": (AdamW, {"maximize": True}),
    # What is left to the optimizer, which then gets gradients.
    "amsgrad": (AdamW, {"amsgrad": True}),
    "nadam": (NAdam, {}),
    "decay in the gradient": (Adam, {"weight_decay": 0.1}),
}
LEFT_TO_TORCH = ("amsgrad", "nadam", "decay in the gradient")
EXACT = ["topk:ratio=1,wire=exact", "topk:ratio=1,wire=exact,route=split", "dense:feedback=true"]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def gradient(step: int, model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(100 + step)
    return {name: torch.randn_like(each) for name, each in model.named_parameters()}


def made(case: str, model: nn.Module) -> Optimizer:
    kind, settings = SETTINGS[case]
    optimizer: Optimizer = kind(model.parameters(), lr=0.01, **settings)
    return optimizer


def simulation_of(spec: str, model: nn.Module, optimizer: Optimizer, ranks: int = 1) -> gradcomp.Simulation:
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    return gradcomp.Simulation(spec, shapes, ranks, optimizer=optimizer, named_parameters=list(model.named_parameters()))


def step(model: nn.Module, optimizer: Optimizer, simulation: gradcomp.Simulation | None, number: int, ranks: int = 1) -> None:
    """All ranks have the same gradient: the mean of their directions is then Adam's of the mean."""
    grads = gradient(number, model)
    updates = grads if simulation is None else simulation.step([grads] * ranks)
    for name, parameter in model.named_parameters():
        parameter.grad = updates[name].clone()
    optimizer.step()


def same(ours: nn.Module, theirs: nn.Module) -> None:
    for own, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


def train(spec: str | None, case: str, ranks: int = 1) -> tuple[nn.Module, Optimizer, gradcomp.Simulation | None]:
    model = net()
    optimizer = made(case, model)
    simulation = None if spec is None else simulation_of(spec, model, optimizer, ranks)
    for number in range(STEPS):
        step(model, optimizer, simulation, number, ranks)
    return model, optimizer, simulation
