"""Models of unusual make."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradcomp.native.extension import MOST_PIECES


class Shifted(nn.Module):
    """A 0-d parameter, one without entries, and one that is a strided view of its layer's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)
        self.layer.weight = nn.Parameter(self.layer.weight.detach().t().contiguous().t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.alone = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + self.empty.sum() + self.alone.sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.middle, self.out = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.out.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(torch.tanh(self.into(x)))))


class Many(nn.Module):
    """More parameters in a bucket than go into one launch of a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(1 + i % 8)) for i in range(MOST_PIECES + 9))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x[0, : part.numel()] * part).sum() for part in self.parts])


class Turned(nn.Module):
    """Its gradients are assigned in another memory order than its parameters have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5))
        for layer in self.layers:
            layer.weight.register_post_accumulate_grad_hook(turn)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def turn(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.t().contiguous().t()
    assert not parameter.grad.is_contiguous()


def channels_last() -> nn.Module:
    layers = [nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.Conv2d(4, 3, 2), nn.Flatten()]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[1].requires_grad_(False)
    return model


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Mixed(nn.Module):
    """float32, bfloat16 and float16 in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 3).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).bfloat16()).half())


MODELS: dict[str, Any] = {
    "channels last": channels_last,
    "turned gradients": Turned,
    "0-d, empty and strided": Shifted,
    "frozen": frozen,
    "tied": Tied,
    "many": Many,
    "bfloat16": lambda: plain().bfloat16(),
    "float16": lambda: plain().half(),
    "mixed": Mixed,
}


# The models whose residuals and updates add up to the gradients in float32.
KEPT = [name for name in MODELS if name not in ("bfloat16", "float16", "mixed")]


def make(model: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[model]()


def step(model: nn.Module, turn: int, rank: int) -> None:
    """A backward pass over examples of this rank's own."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    x = torch.randn(4, 8, generator=generator)
    dtypes = {p.dtype for p in model.parameters()}
    model(x.to(*dtypes) if len(dtypes) == 1 else x).float().square().mean().backward()
