"""A warning about a GradScaler that the exchange does not know."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

import torch


class UnknownScaler:
    """A warning, once, about a GradScaler that steps an optimizer and was not passed as scaler=. known: the one that was."""

    def __init__(self, known: Any):
        self._known, self._warned = known, False

    def look(self) -> None:
        """Look for a GradScaler among the callers. Call this in a step of an optimizer if state stays between steps."""
        if self._warned:
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
