"""The integration of Accelerate: attach() puts a Handler in place of DistributedDataParallelKwargs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, cast

import torch
from torch import compiler
from torch.nn.parallel import DistributedDataParallel

try:
    import accelerate
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedDataParallelKwargs
except ImportError as error:
    text = f"gradcomp.integrations.accelerate needs Accelerate, which does not load ({error}): pip install accelerate"
    raise ImportError(text, name=error.name) from error

from gradcomp import ddp
from gradcomp.core.compressor import Compressor
from gradcomp.handle import Handle
from gradcomp.integrations import common

__all__ = ["Handler", "attach"]

_OTHER_WAY = (
    "gradcomp compresses what DistributedDataParallel exchanges, but this program runs as {way}, which exchanges gradients "
    "by itself; with FSDP2, call gradcomp.fsdp.attach() after prepare(), or in on_train_begin() of a Trainer's callback; else: "
    "accelerate launch --multi_gpu, or torchrun"
)
_UNWRAPPED = (
    "no model has been wrapped in DistributedDataParallel with this Handler: set accelerator.ddp_handler before "
    "accelerator.prepare(model, optimizer), or call attach(trainer, spec) before trainer.train(); and start several processes"
)


class Handler(DistributedDataParallelKwargs):
    """Accelerate's handler of DistributedDataParallel, with a compressed exchange. All ranks set it, before prepare().

    kwargs_handlers= of Accelerator() accepts only Accelerate's own classes.

    Example:
        >>> accelerator = Accelerator()
        >>> accelerator.ddp_handler = Handler("topk")
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    def __init__(self, spec: str | Compressor = "blocks", *, bucket_mb: float | None = None, seed: int = 0, **ddp_options: Any):
        """Make a handler.

        Args:
            spec: "name:knob=value", a compressor, or "auto".
            bucket_mb: The largest size of a bucket; by default bucket_cap_mb, of DDP's own. See gradcomp.ddp.attach().
            seed: The seed of random draws, equal on all ranks.
            **ddp_options: Arguments of DistributedDataParallelKwargs, such as find_unused_parameters=True.

        Raises:
            ValueError: Accelerate uses FSDP, DeepSpeed or something else without DistributedDataParallel.
        """
        super().__init__(**ddp_options)
        common.check_version("accelerate", accelerate.__version__)
        way = str(getattr(AcceleratorState._shared_state.get("distributed_type"), "value", "NO"))
        if way != "NO" and not way.startswith("MULTI_"):
            raise ValueError(_OTHER_WAY.format(way=way))
        self._spec, self._seed = spec, seed
        self._bucket_mb = ddp_options.get("bucket_cap_mb") if bucket_mb is None else bucket_mb
        self._accelerator: Any = None
        self._models: list[DistributedDataParallel] = []
        self._handles: list[Handle] = []

    @property
    def handles(self) -> list[Handle]:
        """The handles of all models, in the order of their prepare(). All ranks must ask, after the optimizers are prepared."""
        for model in self._models[len(self._handles) :]:
            known: Any = {"bucket_mb": self._bucket_mb, "seed": self._seed, "scaler": self._accelerator.scaler}
            self._handles.append(ddp.attach(model, self._spec, **known))
        return self._handles

    @property
    def handle(self) -> Handle:
        """The handle of the first model's exchange: stats(), residual(), set_spec(), remove() and the states.

        Raises:
            RuntimeError: No model is wrapped.
        """
        if not self._models:
            raise RuntimeError(_UNWRAPPED)
        return self.handles[0]

    def figures(self) -> dict[str, float]:
        """Return a few figures of the first model's last step, for accelerator.log()."""
        return common.figures(self._handles[0]) if self._handles else {}

    def save(self, folder: str) -> None:
        """Save each rank's states into a checkpoint's folder. All ranks call it; accelerator.save_state() does."""
        for number, handle in enumerate(self.handles):
            common.save(handle, _stem(folder, number), () if number else self._optimizers())

    def load(self, folder: str) -> None:
        """Load what save() saved, at any number of ranks. All ranks call it; accelerator.load_state() does."""
        for number, handle in enumerate(self.handles):
            common.load(handle, _stem(folder, number), () if number else self._optimizers())

    def _optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """List the optimizers whose states differ from rank to rank. The first model's file has them."""
        return common.own_optimizers(self.handles, self._accelerator._optimizers)

    def to_dict(self, ignore_keys: Any = ()) -> dict[str, Any]:
        """Return the arguments of DistributedDataParallel. Accelerate calls it."""
        return {field.name: getattr(self, field.name) for field in fields(self) if not field.name.startswith("comm_")}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Note a model that was wrapped. Accelerate calls it. The exchange is made when the optimizer is known, too."""
        if self._accelerator is None:
            self._accelerator = accelerator = _caller()
            folders, load_all = list[str](), accelerator.load_state

            def load_state(*args: Any, **options: Any) -> None:
                """Load this rank's states last: Accelerate loads rank 0's optimizers on all ranks."""
                load_all(*args, **options)
                self.load(folders.pop())

            accelerator.register_save_state_pre_hook(lambda models, weights, folder: self.save(folder))
            accelerator.register_load_state_pre_hook(lambda models, folder: folders.append(folder))
            accelerator.load_state = load_state
        present = [each for each in self._accelerator._models if each is not model.module]
        kept = [each for each in self._models if any(each.module is other for other in present)]
        self._handles = [handle for handle, each in zip(self._handles, self._models, strict=False) if each in kept]
        self._models = [*kept, model]
        model.register_forward_pre_hook(compiler.disable(lambda model, inputs: self.handles and None))


def attach(accelerator: accelerate.Accelerator, spec: str | Compressor = "blocks", **options: Any) -> Handle:
    """Compress the exchange of all models that an Accelerator will prepare. All ranks call it, before prepare().

    Args:
        accelerator: The Accelerator. The options of its DistributedDataParallelKwargs stay.
        spec: "name:knob=value", a compressor, or "auto".
        **options: Those of Handler.

    Returns:
        The handle of the first model's exchange, which can be used after prepare().

    Example:
        >>> handle = gradcomp.integrations.accelerate.attach(accelerator, "topk")
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """
    old = accelerator.ddp_handler
    accelerator.ddp_handler = handler = Handler(spec, **{**({} if old is None else old.to_kwargs()), **options})
    return cast(Handle, LazyHandle(lambda: handler))


class LazyHandle:
    """The handle that there is once a model is wrapped."""

    def __init__(self, handler: Callable[[], Handler]):
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler().handle, name)


def _caller() -> Any:
    """Find the Accelerator that calls."""
    frame: Any = sys._getframe(2)
    while frame is not None and not isinstance(frame.f_locals.get("self"), accelerate.Accelerator):
        frame = frame.f_back
    return frame.f_locals["self"]


def _stem(folder: str, number: int) -> str:
    return f"{folder}/gradcomp{number or ''}-rank"
