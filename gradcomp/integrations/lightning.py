"""The integration of Lightning: a strategy for its Trainer, in place of "ddp"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    import lightning
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    text = (
        f"gradcomp.integrations.lightning needs Lightning, which does not load ({error}). In the program, import Trainer from "
        "lightning.pytorch, not from pytorch_lightning, another package with the same classes: pip install lightning"
    )
    raise ImportError(text, name=error.name) from error

from gradcomp import ddp
from gradcomp.core.compressor import Compressor
from gradcomp.handle import Handle
from gradcomp.integrations import common

__all__ = ["GradcompStrategy"]

_TWO_HOOKS = "GradcompStrategy() got {name}=, but a model has one communication hook, and it is gradcomp's; leave {name} out"


class GradcompStrategy(DDPStrategy):
    """Lightning's DDPStrategy with a compressed exchange. Its handle is there once fit() has called setup().

    Checkpoints get a file for each rank beside them, and the logs a few figures.

    Example:
        >>> trainer = Trainer(strategy=GradcompStrategy("topk"), devices=2)
    """

    handle: Handle | None = None

    def __init__(self, spec: str | Compressor = "blocks", *, bucket_mb: float | None = None, seed: int = 0, **ddp_options: Any):
        """Make a strategy.

        Args:
            spec: "name:knob=value", a compressor, or "auto".
            bucket_mb: The largest size of a bucket; by default bucket_cap_mb, of DDP's own. See gradcomp.ddp.attach().
            seed: The seed of random draws, equal on all ranks.
            **ddp_options: Arguments of DDPStrategy, such as find_unused_parameters=True.

        Raises:
            ValueError: ddp_options have another communication hook.
        """
        common.check_version("lightning", lightning.__version__)
        for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"):
            if ddp_options.get(name) is not None:
                raise ValueError(_TWO_HOOKS.format(name=name))
        super().__init__(**ddp_options)
        self._spec, self._seed = spec, seed
        self._bucket_mb = ddp_options.get("bucket_cap_mb") if bucket_mb is None else bucket_mb
        self._resumed: Any = None

    def setup(self, trainer: lightning.Trainer) -> None:
        """Wrap the model, make its optimizers, and then the exchange. The Trainer calls it."""
        super().setup(trainer)
        if self.model is self.lightning_module:  # validate(), test() and predict() exchange nothing
            return
        known: Any = {
            "bucket_mb": self._bucket_mb,
            "seed": self._seed,
            "scaler": getattr(self.precision_plugin, "scaler", None),
        }
        self.handle = ddp.attach(self.model, self._spec, **known)
        if not any(isinstance(each, _Figures) for each in trainer.callbacks):
            trainer.callbacks.append(_Figures())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save each rank's state beside a checkpoint, unless the checkpoint is of the weights alone."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.handle is not None and "optimizer_states" in checkpoint:
            common.save(self.handle, _stem(filepath), common.own_optimizers([self.handle], self.optimizers))

    def load_checkpoint(self, checkpoint_path: Any, *rest: Any, **options: Any) -> dict[str, Any]:
        """Note the checkpoint that is loaded. The exchange is not there yet."""
        self._resumed = checkpoint_path
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *rest, **options)
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states, and the ranks' states that lie beside the checkpoint."""
        super().load_optimizer_state_dict(checkpoint)
        if self.handle is not None and self._resumed is not None:
            # A link to a checkpoint, as of ModelCheckpoint(save_last="link"), has the files of its target.
            path = Path(self._resumed)
            stem = _stem(path.resolve() if path.is_symlink() else self._resumed)
            common.load(self.handle, stem, common.own_optimizers([self.handle], self.optimizers))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, and the ranks' states beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            common.remove(_stem(filepath))


class _Figures(Callback):
    """Logs a few figures of the exchange, as often as the Trainer logs."""

    def on_train_batch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule, *rest: Any) -> None:
        handle = getattr(trainer.strategy, "handle", None)
        if handle is not None and trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            module.log_dict(common.figures(handle))


def _stem(checkpoint: Any) -> str:
    return f"{checkpoint}.gradcomp-rank"
