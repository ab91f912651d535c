"""Optimizers that people write around torch's, for the table of loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Around(Optimizer):
    """An optimizer around another one, whose groups it shares."""

    def __init__(self, inner: Optimizer):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    @property
    def weights(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"]]


class SAM(Around):
    """Steps by the gradient at the top of a short climb along the first gradient. The closure makes both."""

    climb = 0.05

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Climb, call the closure, go back, and step."""
        before = [each.clone() for each in self.weights]
        norm = torch.stack([each.grad.norm() for each in self.weights if each.grad is not None]).norm()
        for each in self.weights:
            if each.grad is not None:
                each.add_(each.grad * (self.climb / (norm + 1e-12)))
        with torch.enable_grad():
            loss = closure()
        torch._foreach_copy_(self.weights, before)
        self.inner.step()
        return loss


class Lookahead(Around):
    """Goes back half of the way to slow weights in every fifth step."""

    def __init__(self, inner: Optimizer):
        super().__init__(inner)
        self.steps, self.slow = 0, [each.detach().clone() for each in self.weights]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step, and go back where it is time."""
        self.inner.step()
        self.steps += 1
        if self.steps % 5 == 0:
            for slow, each in zip(self.slow, self.weights, strict=True):
                each.copy_(slow.lerp_(each, 0.5))


class Masters(Optimizer):
    """Steps float32 copies of 16-bit weights, with momentum, and rounds them to the weights."""

    def __init__(self, parameters: Any, lr: float, momentum: float = 0.9):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step."""
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    state = self.state[each]
                    moment = state.setdefault("momentum_buffer", torch.zeros_like(each, dtype=torch.float32))
                    moment.mul_(group["momentum"]).add_(each.grad)
                    each.copy_(state.setdefault("master", each.float()).sub_(moment, alpha=group["lr"]))
