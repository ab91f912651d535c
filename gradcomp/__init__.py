"""Compress the gradients of distributed training. Horovod and torch stay unmodified.

Horovod: compression=gradcomp.horovod.Compression("topk:ratio=0.01", model.named_parameters()) in hvd.DistributedOptimizer(...)
or:      gradcomp.horovod.DistributedOptimizer(optimizer, model.named_parameters(), "topk:ratio=0.01"), which is faster
DDP:     handle = gradcomp.ddp.attach(model, "blocks"), after DistributedDataParallel(model)
FSDP2:   handle = gradcomp.fsdp.attach(model, "blocks"), after fully_shard() or replicate()
local:   gradcomp.local.LocalSteps(model, optimizer, "sign", every=32), for links too slow to exchange gradients in every step
trainers: gradcomp.integrations.transformers.attach(trainer, "topk"), .accelerate.Handler, .lightning.GradcompStrategy
trial:   gradcomp.Simulation("topk:ratio=0.01", {"weight": (512, 512)}, world=8).step([{"weight": gradient}, ...])
predict: print(gradcomp.predict(model, ranks=8, link="1Gbit/s", forward_time=0.03, backward_time=0.06)): step times
look:    .stats(), .residual(); set_spec(spec) continues with another spec; state_dict() and load_state_dict() for checkpoints
end:     handle.remove() sends what still waits, and gives the model back to DDP, FSDP2 or Horovod alone
watch:   gradcomp.telemetry.watch(handle, gradcomp.telemetry.JsonLines("logs")); replicas are checked, too
specs:   "name:knob=value,knob=value", or gradcomp.TopK(ratio=0.01); list_compressors() and describe("topk") explain them
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
    from gradcomp.aliases import GradcompWarning as GradcompWarning
    from gradcomp.compressors.bingrad import BinGrad as BinGrad
    from gradcomp.compressors.blocks import Blocks as Blocks
    from gradcomp.compressors.dense import Dense as Dense
    from gradcomp.compressors.gs_sgd import GsSgd as GsSgd
    from gradcomp.compressors.gtopk import GTopK as GTopK
    from gradcomp.compressors.half import Half as Half
    from gradcomp.compressors.lgc import Lgc as Lgc
    from gradcomp.compressors.linear import Linear as Linear
    from gradcomp.compressors.orq import Orq as Orq
    from gradcomp.compressors.qsgd import Qsgd as Qsgd
    from gradcomp.compressors.sdagc import Sdagc as Sdagc
    from gradcomp.compressors.sign import Sign as Sign
    from gradcomp.compressors.sketched_sgd import SketchedSgd as SketchedSgd
    from gradcomp.compressors.terngrad import TernGrad as TernGrad
    from gradcomp.compressors.topk import TopK as TopK
    from gradcomp.prediction.predict import predict as predict
    from gradcomp.simulate import Simulation as Simulation
    from gradcomp.spec import by_layer as by_layer
    from gradcomp.spec import describe as describe
    from gradcomp.spec import list_compressors as list_compressors
    from gradcomp.spec import make as make
    from gradcomp.spec import make_compressor as make_compressor
    from gradcomp.spec import names as names

__all__ = ["GradcompWarning", "Simulation", "__version__", "by_layer", "describe", "list_compressors", "make"]
__all__ += ["make_compressor", "names", "predict", "telemetry"]
__all__ += ["BinGrad", "Blocks", "Dense", "GTopK", "GsSgd", "Half", "Lgc", "Linear", "Orq", "Qsgd", "Sdagc", "Sign"]
__all__ += ["SketchedSgd", "TernGrad", "TopK"]

# The modules of names that are imported at their first use; of others, it is that of specs. A module is imported itself.
_MODULES = {"GradcompWarning": "aliases", "Simulation": "simulate", "predict": "prediction.predict"}


def __getattr__(name: str) -> Any:
    """Import a name at its first use: torch takes seconds, and Horovod or torch.distributed may be missing."""
    if name in ("core", "ddp", "fsdp", "handle", "horovod", "integrations", "local", "prediction", "spec", "telemetry"):
        return importlib.import_module(f"gradcomp.{name}")
    if name in __all__:
        module: Any = importlib.import_module(f"gradcomp.{_MODULES.get(name, 'spec')}")
        globals()[name] = found = getattr(module, name, None) or module.class_called(name)
        return found
    raise AttributeError(f"module 'gradcomp' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the names that can be imported here: help() imports all of them."""
    import torch

    has_torch = torch.distributed.is_available()
    has_fsdp2 = has_torch and find_spec("torch.distributed._composable.replicate_with_fsdp") is not None
    doors = {"ddp": has_torch, "fsdp": has_fsdp2, "local": has_torch, "horovod": find_spec("horovod") is not None}
    return [*__all__, *(name for name, importable in doors.items() if importable)]
