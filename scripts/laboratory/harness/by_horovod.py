"""Training through Horovod, by each way that it has, and by two published projects: GRACE, and Deep Gradient Compression.

The folder that PROJECTS names holds `grace` (github.com/sands-lab/grace) and `dgc` (synxlin/deep-gradient-compression). Their
files for Horovod replace parts of an old Horovod. Here their compressors are called from hooks on the gradients, in the
order in which backward makes them, as their own optimizers call them; the exchange is theirs.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import gradcomp.horovod
from laboratory.harness import ways
from laboratory.harness.ways import PROJECTS, Fitted
from laboratory.refusal import Refused

Named = Sequence[tuple[str, nn.Parameter]]


class Door:
    """The ranks of Horovod."""

    def __init__(self) -> None:
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()

    def means(self, own: list[float], name: str) -> list[float]:
        """Return the means of figures over the ranks."""
        mean = hvd.allreduce(torch.tensor(own, dtype=torch.float64), op=hvd.Average, name=name)
        return [float(figure) for figure in mean]

    def end(self) -> None:
        """Leave the ranks, when all of them are done: one that shuts down ends Horovod for the others."""
        hvd.barrier()
        hvd.shutdown()

    def fit(self, way: str, model: nn.Module, optimizer: Any, seed: int, clip: float) -> Fitted:
        """Fit a way to a model and its optimizer. The way is part of the names, so that Horovod's caches are not shared."""
        named = [(f"{way}.{name}", parameter) for name, parameter in model.named_parameters()]
        entries = sum(parameter.numel() for parameter in model.parameters())
        found = ways.other(way)
        if found is None:
            made = gradcomp.horovod.DistributedOptimizer(optimizer, named, compression=way, seed=seed)
            return Fitted(model, made, lambda: int(made.stats()["bytes_sent"]), made.stats)
        name, number = found
        if name == "none":
            return Fitted(model, optimizer, lambda: 0)
        if name in ("grace", "dgc"):
            return Fitted(model, (grace if name == "grace" else dgc)(optimizer, named, number), lambda: None)
        compression = hvd.Compression.fp16 if name == "fp16" else hvd.Compression.none
        made = hvd.DistributedOptimizer(optimizer, named, compression=compression)
        return Fitted(model, made, lambda: (2 if name == "fp16" else 4) * entries)


class Hooked:
    """An optimizer whose step waits for an exchange that hooks began in backward.

    begin: starts a gradient's exchange, and returns a function that waits for the mean.
    """

    def __init__(self, optimizer: Any, named: Named, begin: Callable[[Tensor, str], Callable[[], Tensor]]):
        self._optimizer, self._begin = optimizer, begin
        self._waits: list[tuple[nn.Parameter, Callable[[], Tensor]]] = []
        for name, parameter in named:
            parameter.register_post_accumulate_grad_hook(self._hook(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> None:
        """Wait for all means, and step."""
        for parameter, wait in self._waits:
            parameter.grad = wait()
        self._waits.clear()
        self._optimizer.step()

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
            self._waits.append((parameter, self._begin(parameter.grad, name)))

        return hook


def grace(optimizer: Any, named: Named, ratio: float) -> Hooked:
    """Fit GRACE's Top-k, its residual memory and its allgather, as its examples put them together."""
    compressor = _found("grace", "grace_dl.torch.compressor.topk").TopKCompressor(ratio)
    memory = _found("grace", "grace_dl.torch.memory.residual").ResidualMemory()
    communicator = _found("grace", "grace_dl.torch.communicator.allgather").Allgather(compressor, memory, hvd.size())

    def begin(grad: Tensor, name: str) -> Callable[[], Tensor]:
        sent = communicator.send_step(grad, name)
        return lambda: communicator.receive_step(*sent)

    return Hooked(optimizer, named, begin)


def dgc(optimizer: Any, named: Named, ratio: float) -> Hooked:
    """Fit Deep Gradient Compression with momentum correction and masking; layers of one dimension stay dense, as there.

    The momentum moves from the optimizer into the memory. AdamW has none to move; the memory then keeps the residual alone.
    """
    group = optimizer.param_groups[0]
    momentum = float(group.get("momentum", 0.0))
    memory = _found("dgc", "dgc.memory").DGCSGDMemory(momentum=momentum)
    compressor = _found("dgc", "dgc.compression").DGCCompressor(ratio, memory)
    if momentum:
        group["momentum"] = 0.0
        optimizer = _found("dgc", "dgc.optim").DGCSGD(
            [parameter for _, parameter in named], group["lr"], momentum, weight_decay=group["weight_decay"]
        )
    with contextlib.redirect_stdout(io.StringIO()):
        memory.initialize(named)
        compressor.initialize([(name, parameter) for name, parameter in named if parameter.dim() > 1])

    def begin(grad: Tensor, name: str) -> Callable[[], Tensor]:
        sent, context = compressor.compress(grad, name)
        handle = compressor.communicate(sent, name, hvd.Average)
        return lambda: compressor.decompress(compressor.synchronize(handle), context)

    return Hooked(optimizer, named, begin)


def _found(project: str, module: str) -> Any:
    """Import a module of a project."""
    folder = Path(os.environ.get(PROJECTS, "")) / project
    if PROJECTS not in os.environ or not folder.is_dir():
        raise Refused(f"there is no checkout of {project}; name its parent folder by --projects")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        vars(sys.modules["torch.optim.optimizer"]).setdefault("required", object())  # DGC imports it; torch has dropped it
    return importlib.import_module(module)
