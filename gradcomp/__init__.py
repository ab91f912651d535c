"""Compress the gradients of distributed training. Horovod and torch stay as they are.

Horovod: compression=gradcomp.horovod.Compression("topk:ratio=0.01", model.named_parameters()) in hvd.DistributedOptimizer(...)
or:      gradcomp.horovod.DistributedOptimizer(optimizer, model.named_parameters(), "topk:ratio=0.01"), which is faster
DDP:     handle = gradcomp.ddp.attach(model, "topk:ratio=0.01", optimizer=optimizer)
FSDP2:   handle = gradcomp.fsdp.attach(model, "blocks"), after fully_shard() or replicate()
local:   gradcomp.local.LocalSteps(model, optimizer, "sign", every=32), for links that carry no gradient a step
trainers: gradcomp.integrations.transformers.attach(trainer, "topk"), .accelerate.Handler, .lightning.GradcompStrategy
trial:   gradcomp.Simulation("topk:ratio=0.01", {"weight": (512, 512)}, world=8).step([{"weight": gradient}, ...])
predict: print(gradcomp.predict(model, ranks=8, link="1Gbit/s", forward=0.03, backward=0.06)): step times, before any cluster
look:    .stats(), .residual(); change(spec) continues with another spec; state_dict() and load_state_dict() for checkpoints
watch:   gradcomp.telemetry.watch(handle, gradcomp.telemetry.JsonLines("logs")); replicas are checked, too
specs:   "name:knob=value,knob=value"; gradcomp.names() lists the names, gradcomp.describe("topk") explains one
trouble: gradcomp doctor shows the installation and its problems
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gradcomp._version import VERSION as __version__

if TYPE_CHECKING:
    from gradcomp import ddp as ddp
    from gradcomp import fsdp as fsdp
    from gradcomp import horovod as horovod
    from gradcomp import local as local
    from gradcomp import telemetry as telemetry
    from gradcomp.prediction.predict import predict as predict
    from gradcomp.simulate import Simulation as Simulation
    from gradcomp.spec import by_layer as by_layer
    from gradcomp.spec import describe as describe
    from gradcomp.spec import make as make
    from gradcomp.spec import names as names

__all__ = ["Simulation", "__version__", "by_layer", "describe", "make", "names", "predict", "telemetry"]

# The modules of names that are imported at their first use. A module that has no name here is imported itself.
_MODULES = {"Simulation": "simulate", "predict": "prediction.predict"} | dict.fromkeys(
    ("by_layer", "describe", "make", "names"), "spec"
)


def __getattr__(name: str) -> Any:
    """Import a name at its first use: torch takes seconds, and Horovod or torch.distributed may be missing."""
    if name in _MODULES:
        globals()[name] = found = getattr(importlib.import_module(f"gradcomp.{_MODULES[name]}"), name)
        return found
    if name in ("core", "ddp", "fsdp", "handle", "horovod", "integrations", "local", "prediction", "spec", "telemetry"):
        return importlib.import_module(f"gradcomp.{name}")
    raise AttributeError(f"module 'gradcomp' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the names that can be imported here: help() imports all of them."""
    import torch

    has_torch = torch.distributed.is_available()
    has_fsdp2 = has_torch and find_spec("torch.distributed._composable.replicate_with_fsdp") is not None
    doors = {"ddp": has_torch, "fsdp": has_fsdp2, "local": has_torch, "horovod": find_spec("horovod") is not None}
    return [*__all__, *(name for name, importable in doors.items() if importable)]
