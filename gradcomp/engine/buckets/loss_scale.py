"""The loss scale of a GradScaler. It is read where the gradients lie, so that nobody waits for a device."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor


class LossScale:
    """What a GradScaler multiplies the loss by.

    Residuals and velocities are kept without it. Otherwise entries that wait would count double after the scale has halved.
    """

    def __init__(self, scaler: Any):
        enabled = getattr(scaler, "is_enabled", None)
        # A scaler offers its scale in public only as a number, for which a GPU would have to be waited for.
        if enabled is None or (enabled() and not hasattr(scaler, "_scale")):
            raise TypeError(
                f"scaler= is a {type(scaler).__name__}, whose scale cannot be read; pass the training's torch.amp.GradScaler"
            )
        self.scaler = scaler

    def on(self, device: torch.device) -> Tensor | None:
        """Return the current scale, as one float on a device. None before the first loss is scaled, and if scaling is off."""
        scale: Tensor | None = self.scaler._scale if self.scaler.is_enabled() else None
        # A copy to a CPU would not have ended when it is read.
        return None if scale is None else scale.detach().reshape(1).to(device, torch.float32, non_blocking=device.type != "cpu")


class UnknownScaler:
    """A warning, once, about a GradScaler that steps an optimizer and was not passed as scaler=.

    matters: decides whether entries or a momentum stay from step to step, so that the scale has to be known.
    """

    def __init__(self, known: Any, matters: Callable[[], bool]):
        self._known, self._matters, self._warned = known, matters, False

    def look(self) -> None:
        """Look for a GradScaler among the callers. Call this in an optimizer's step."""
        if self._warned or not self._matters():
            return
        scaler, stacklevel = _stepping_scaler()
        if scaler is None or scaler is self._known or not scaler.is_enabled():
            return
        self._warned = True
        warnings.warn(
            "a GradScaler steps the optimizer, but gradcomp does not know its scale: whenever the scale changes, entries that "
            "wait, and the momentum, count too much or too little. Pass scaler=scaler to gradcomp.horovod.Compression, "
            "gradcomp.horovod.DistributedOptimizer or gradcomp.ddp.attach",
            stacklevel=stacklevel,
        )


def _stepping_scaler() -> tuple[Any, int]:
    """Find the GradScaler whose step() calls an optimizer's, if one does, and the stack level of its caller for warnings."""
    frame: FrameType | None = sys._getframe(1)
    scaler, level = None, 0
    while frame is not None:
        level += 1
        if frame.f_code.co_name in ("step", "_maybe_opt_step"):
            own = frame.f_locals.get("self")
            if isinstance(own, _SCALERS):
                scaler = own
            elif scaler is not None:
                break
        elif scaler is not None:
            break
        frame = frame.f_back
    return scaler, level


# Older versions of torch have only the second.
_SCALERS = (getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler), torch.cuda.amp.GradScaler)
