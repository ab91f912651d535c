"""torch's Adam and AdamW, whose moments the exchange has taken over: it steps in their place (stages/adam)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradcomp.core.compressor import Layout
from gradcomp.engine.context import AdamStep
from gradcomp.engine.optimizers.delivered_sample import Holds
from gradcomp.engine.optimizers.loaded_moments import LoadedMoments

# Settings with which the optimizer does something else than the exchange.
UNLIKE = ("amsgrad", "differentiable")


class AdamMoments:
    """Steps in Adam's place: weights decay, and directions are added. Gradients are hidden from Adam meanwhile."""

    name: ClassVar[str] = "Adam"
    types: ClassVar[tuple[type, ...]] = (torch.optim.Adam,)
    holds: ClassVar[Holds] = "direction"
    arrays: ClassVar[Mapping[str, str]] = {"exp_avg": "first", "exp_avg_sq": "second"}

    def __init__(self, loaded: LoadedMoments):
        self._loaded = loaded
        self._hidden: list[tuple[torch.nn.Parameter, Tensor]] = []

    def fits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Decide whether the moments can be taken over: one kind of them, and a weight decay that stays out of them."""
        if not isinstance(optimizer, self.types):
            return False
        groups = optimizer.param_groups
        kinds = {(*map(float, group["betas"]), group["eps"]) for group in groups}
        apart = all(group["weight_decay"] == 0 or group.get("decoupled_weight_decay") for group in groups)
        return len(kinds) == 1 and groups[0]["eps"] > 0 and apart and not any(g.get(each) for g in groups for each in UNLIKE)

    def of(self, optimizer: torch.optim.Optimizer, layout: Layout, share: float, skipped: bool) -> AdamStep:
        """Take the moments over for some layers in this step. See SgdMomentum.of()."""
        group = optimizer.param_groups[0]
        seeds, steps = None, 0
        if self._loaded.may_have(optimizer):
            found = [self._loaded.take(optimizer, name, [*self.arrays]) for name in layout.names]
            seeds = [None if pair is None else (share * pair[0], share**2 * pair[1]) for pair in found]
            seeded = [name for name, seed in zip(layout.names, seeds, strict=True) if seed is not None]
            steps = max(map(self._loaded.steps, seeded), default=0)
        betas = float(group["betas"][0]), float(group["betas"][1])
        return AdamStep(*betas, group["eps"], share, layout.sizes, seeds, steps, skipped)

    def state(
        self, group: Mapping[str, Any], parameter: Tensor, kept: Sequence[Tensor], steps: int, sums: int
    ) -> dict[str, Any]:
        """Make the optimizer's state of a parameter. See SgdMomentum.state()."""
        scaled = sums * kept[0], sums**2 * kept[1]
        moments = {key: mean.to(parameter.dtype) for key, mean in zip(self.arrays, scaled, strict=True)}
        on_device = group.get("capturable") or group.get("fused")
        return moments | {"step": torch.tensor(float(steps), device=parameter.device if on_device else "cpu")}

    def share_of_gradients(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the share of directions that wait in the gradients of the next exchange. They have been dropped."""
        return 1.0

    @property
    def hides(self) -> bool:
        return bool(self._hidden)

    @torch.no_grad()
    def hide(self, optimizer: torch.optim.Optimizer, pending: bool) -> None:
        """Step, and hide the gradients from the optimizer, which then finds nothing to do.

        pending: there is an update to apply. Horovod, too, steps without one: to make a state that it can broadcast.
        """
        if getattr(optimizer, "found_inf", None) is not None:
            raise RuntimeError(
                "a GradScaler leaves it to an optimizer with fused=True to look for infinities, which momentum=auto cannot: it "
                "steps in Adam's place. Make the optimizer with fused=False, or write momentum=0 into the spec; under auto, "
                "loss=low"
            )
        for group in optimizer.param_groups:
            own = [parameter for parameter in group["params"] if parameter.grad is not None]
            grads = [parameter.grad for parameter in own]
            if not own:
                continue
            if pending:
                _descend(own, grads, group)
            for parameter, grad in zip(own, grads, strict=True):
                self._hidden.append((parameter, grad))
                parameter.grad = None

    def show(self) -> None:
        """Show the gradients again."""
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden.clear()


def _descend(own: list[Tensor], directions: list[Tensor], group: Mapping[str, Any]) -> None:
    """Decay weights, and move them by directions. A rate on the device, as with capturable=True, is not waited for."""
    on_device = isinstance(group["lr"], Tensor) and group["lr"].is_cuda
    rate = group["lr"] if on_device else float(group["lr"])
    if group["weight_decay"]:
        torch._foreach_mul_(own, 1 - rate * group["weight_decay"])
    signed = rate if group.get("maximize") else -rate
    if on_device:
        torch._foreach_add_(own, torch._foreach_mul(directions, signed))
    else:
        torch._foreach_add_(own, directions, alpha=signed)
