"""Gradient compression for distributed training: for unmodified Horovod, for DDP, and a simulator to try it in one process."""

from __future__ import annotations

import importlib
from types import ModuleType

from gradcomp.compressors import by_layer, make, names
from gradcomp.simulate import Simulation

__all__ = ["Simulation", "__version__", "by_layer", "make", "names"]
__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """The front ends are there without an import of their own, but are loaded only when they are asked for."""
    if name in ("ddp", "horovod"):
        return importlib.import_module(f"gradcomp.{name}")
    raise AttributeError(f"module 'gradcomp' has no attribute {name!r}")
