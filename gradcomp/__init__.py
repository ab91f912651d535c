"""Gradient compression for distributed training, with unmodified Horovod, with DDP, or simulated in one process.

The doors are gradcomp.horovod.Compression, gradcomp.horovod.DistributedOptimizer, gradcomp.ddp.attach and gradcomp.Simulation.
Each takes a spec, for example "topk:ratio=0.01,momentum=0.9". names() lists the compressors, describe("topk") explains one.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from gradcomp._version import VERSION as __version__
from gradcomp.simulate import Simulation
from gradcomp.spec import by_layer, describe, make, names

if TYPE_CHECKING:
    from gradcomp import ddp as ddp
    from gradcomp import horovod as horovod

__all__ = ["Simulation", "__version__", "by_layer", "describe", "make", "names"]


def __getattr__(name: str) -> ModuleType:
    """Import the door of a network at its first use: Horovod or torch.distributed may be missing."""
    if name in ("ddp", "horovod"):
        return importlib.import_module(f"gradcomp.{name}")
    raise AttributeError(f"module 'gradcomp' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the names that can be imported here: help() imports all of them."""
    doors = {"ddp": torch.distributed.is_available(), "horovod": find_spec("horovod") is not None}
    return [*__all__, *(name for name, importable in doors.items() if importable)]
