"""Gradient compression for distributed training: for unmodified Horovod, for DDP, and a simulator to try it in one process.

Doors: gradcomp.horovod.Compression and DistributedOptimizer, gradcomp.ddp.attach, gradcomp.Simulation. Each takes a spec, such
as "topk:ratio=0.01,momentum=0.9": names() lists the compressors, and describe("topk") says what one does, with all its knobs.
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
    """Load a door to a network when it is first asked for: each needs what the others do without."""
    if name in ("ddp", "horovod"):
        return importlib.import_module(f"gradcomp.{name}")
    raise AttributeError(f"module 'gradcomp' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What can be had here: help() looks at all of it."""
    there = {"ddp": torch.distributed.is_available(), "horovod": find_spec("horovod") is not None}
    return [*__all__, *(name for name, can in there.items() if can)]
