"""Gradient compression for distributed training: a plugin for unmodified Horovod, and a simulator to try it in one process."""

from __future__ import annotations

import importlib
from types import ModuleType

from gradcomp.compressors import by_layer, make, names
from gradcomp.simulate import Simulation

__all__ = ["Simulation", "__version__", "by_layer", "make", "names"]
__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """gradcomp.horovod is there without an import of its own, but Horovod is loaded only when it is asked for."""
    if name == "horovod":
        return importlib.import_module("gradcomp.horovod")
    raise AttributeError(f"module 'gradcomp' has no attribute {name!r}")
