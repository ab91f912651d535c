"""The cases of the table of trainers: loops that people write, and the trainers that people run, on text, under DDP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

import gradcomp
from laboratory.loops.cases import DDP, accumulation, clip, closure
from laboratory.loops.cell import Case, TextCell, UnclippedCell
from laboratory.tasks import texts

# The norm that gradients are clipped to: the default of HF's Trainer.
CLIP = 1.0


class Batches(IterableDataset[Any]):
    """A rank's batches, for trainers that ask for a loader."""

    def __init__(self, cell: TextCell):
        self.cell = cell

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.cell.steps):
            x, y = next(self.cell.batches)
            yield {"x": x, "labels": y}


class WithLoss(nn.Module):
    """A net that returns its loss, as transformers' models do."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": texts.loss(self.net(x), labels)}


def loader(cell: TextCell) -> DataLoader[Any]:
    """Make the loader of a rank's batches."""
    return DataLoader(Batches(cell), batch_size=None)


def transformers(cell: TextCell) -> None:
    """Train by HF's Trainer, which clips by default."""
    from transformers import Trainer, TrainingArguments

    class Text(Trainer):  # type: ignore[misc, unused-ignore]
        def get_train_dataloader(self) -> DataLoader[Any]:
            return loader(cell)

    folder = os.environ["GRADCOMP_TEST_REPORTS"]
    settings = TrainingArguments(
        output_dir=folder, max_steps=cell.steps, max_grad_norm=CLIP, use_cpu=True, save_strategy="no", report_to=[],
        disable_tqdm=True, logging_strategy="no", ddp_backend="gloo",
    )  # fmt: skip
    inner = cell.make()
    trainer = Text(WithLoss(cell.net), settings, optimizers=(inner, LambdaLR(inner, lambda step: 1.0)))
    if cell.key.spec:
        from gradcomp.integrations import transformers as ours

        ours.attach(trainer, cell.key.spec)
    trainer.train()


def accelerate(cell: TextCell) -> None:
    """Train by Accelerate, and clip as its examples do."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # of the cell before
    accelerator = Accelerator(cpu=True)
    if cell.key.spec:
        from gradcomp.integrations.accelerate import Handler

        accelerator.ddp_handler = Handler(cell.key.spec)
    model, optimizer = accelerator.prepare(cell.net, cell.make())
    for batch in Batches(cell):
        optimizer.zero_grad()
        accelerator.backward(texts.loss(model(batch["x"]), batch["labels"]))
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def lightning(cell: TextCell) -> None:
    """Train by Lightning's Trainer, which gives every step a closure, with its own clip."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Text(LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self, net: nn.Module):
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Tensor:
            return texts.loss(self.net(batch["x"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return cell.make(self.parameters())

    strategy: Any = DDPStrategy(process_group_backend="gloo")
    if cell.key.spec:
        from gradcomp.integrations.lightning import GradcompStrategy

        strategy = GradcompStrategy(cell.key.spec, process_group_backend="gloo")
    trainer = Trainer(
        accelerator="cpu", devices=cell.size, strategy=strategy, plugins=[TorchElasticEnvironment()], max_steps=cell.steps,
        gradient_clip_val=CLIP, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Text(cell.net), loader(cell))


def fabric(cell: TextCell) -> None:
    """Train by Lightning's Fabric, and clip by it."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo")
    own = Fabric(accelerator="cpu", devices=cell.size, strategy=strategy, plugins=[TorchElasticEnvironment()])
    own.launch()
    model, optimizer = own.setup(cell.net, cell.make())
    if cell.key.spec:
        gradcomp.ddp.attach(model._forward_module, cell.key.spec)
    for batch in Batches(cell):
        optimizer.zero_grad()
        own.backward(texts.loss(model(batch["x"]), batch["labels"]))
        own.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()


def ray_train(cell: TextCell) -> None:
    """Train as a worker of Ray Train."""
    from ray.train.torch import prepare_model

    cell.optimizer, cell.whole = cell.make(), prepare_model(cell.net)
    if cell.key.spec:
        cell.handle = gradcomp.ddp.attach(cell.whole, cell.key.spec)
    for _ in range(cell.steps):
        cell.backward()
        nn.utils.clip_grad_norm_(cell.whole.parameters(), CLIP)
        cell.optimizer.step()


@contextmanager
def as_torchrun() -> Iterator[None]:
    """Set the variables that trainers take for those of torchrun."""
    before = dict(os.environ)
    rank, size = before["HOROVOD_RANK"], before["HOROVOD_SIZE"]
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    os.environ |= {**own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "lab"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


on_text, by_itself = partial(Case, doors=DDP, cell=TextCell), partial(Case, doors=DDP, cell=TextCell, wraps=False)

TRAINERS = {
    "plain, clip_grad_norm_": on_text(clip),
    "plain, step(closure)": on_text(closure, cell=UnclippedCell),
    "plain, accumulation": on_text(accumulation, cell=UnclippedCell),
    "HF Trainer": by_itself(transformers),
    "Accelerate": by_itself(accelerate),
    "Lightning": by_itself(lightning),
    "Fabric": by_itself(fabric),
    "Ray Train": by_itself(ray_train, doors=("ray",)),
}
