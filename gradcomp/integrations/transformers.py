"""The integration of Hugging Face's Trainer: attach(trainer, spec), before trainer.train()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

try:
    import transformers
except ImportError as error:
    text = f"gradcomp.integrations.transformers needs transformers ({error}): pip install accelerate transformers"
    raise ImportError(text, name=error.name) from error

from gradcomp.aliases import either
from gradcomp.core.compressor import Compressor
from gradcomp.handle import Handle
from gradcomp.integrations import common
from gradcomp.integrations.accelerate import Handler, LazyHandle
from gradcomp.integrations.accelerate import attach as attach_accelerator

__all__ = ["attach"]

_DATA_PARALLEL = (
    "this Trainer trains on {count} devices in one process, by torch's DataParallel, which exchanges no gradients between "
    "processes; start one process per device: torchrun --nproc-per-node {count} ..."
)
_SHARDED = (
    "this Trainer's model was loaded in shards, over several processes, and exchanges gradients by itself; load it without "
    "tp_plan, distributed_config and device_map to train it by DistributedDataParallel"
)


def attach(
    trainer: transformers.Trainer,
    spec: str | Compressor = "blocks",
    *,
    bucket_mb: float | None = None,
    bucket_cap_mb: float | None = None,
    seed: int = 0,
) -> Handle:
    """Compress the exchange of a Trainer's gradients. All ranks call it, before trainer.train().

    Checkpoints get a file for each rank, and the logs a few figures.

    Args:
        trainer: The Trainer, also of a subclass.
        spec: "name:knob=value", a compressor, or "auto".
        bucket_mb: The largest size of a bucket, or bucket_cap_mb. See gradcomp.ddp.attach().
        seed: The seed of random draws, equal on all ranks.

    Returns:
        The handle of the exchange, which can be used once trainer.train() has begun: in callbacks, and after it.

    Raises:
        ValueError: The Trainer uses FSDP, DeepSpeed or something else without DistributedDataParallel.

    Example:
        >>> handle = gradcomp.integrations.transformers.attach(trainer, "topk")
        >>> trainer.train()
    """
    common.check_version("transformers", transformers.__version__)
    if trainer.args.n_gpu > 1:
        raise ValueError(_DATA_PARALLEL.format(count=trainer.args.n_gpu))
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ValueError(_SHARDED)
    bucket_mb = either(None, bucket_mb=bucket_mb, bucket_cap_mb=bucket_cap_mb)
    make_accelerator = trainer.create_accelerator_and_postprocess

    def handler() -> Handler:
        return cast(Handler, trainer.accelerator.ddp_handler)

    def set_handler() -> None:
        attach_accelerator(trainer.accelerator, spec, bucket_mb=bucket_mb, seed=seed)

    def make_again() -> None:
        make_accelerator()
        set_handler()

    def load(folder: str | None) -> None:
        if folder is not None:  # of a training that does not resume
            handler().load(folder)

    set_handler()
    trainer.create_accelerator_and_postprocess = make_again  # hyperparameter_search() calls it in each trial
    _extend(trainer, "_save_optimizer_and_scheduler", lambda folder: handler().save(folder))
    _extend(trainer, "_load_optimizer_and_scheduler", load, follows=True)
    _extend(trainer, "log", lambda logs, *rest: _add_figures(logs, handler()))
    return cast(Handle, LazyHandle(handler))


def _extend(trainer: transformers.Trainer, name: str, act: Callable[..., object], *, follows: bool = False) -> None:
    """Let a method of one Trainer act before it does what it did, or after it (follows)."""
    method = getattr(trainer, name)

    def extended(*args: Any, **options: Any) -> Any:
        if not follows:
            act(*args)
        result = method(*args, **options)
        if follows:
            act(*args)
        return result

    setattr(trainer, name, extended)


def _add_figures(logs: dict[str, float], handler: Handler) -> None:
    """Add figures to a log of training."""
    logs.update(handler.figures() if "loss" in logs else {})
