"""Trains a small net by Lightning's Trainer, and by Fabric: torchrun by_lightning.py FOLDER SPEC CHECKPOINT|-."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.nn.functional import cross_entropy
from trainers import data, finish, net, weights

import gradcomp
from gradcomp.integrations.lightning import GradcompStrategy

folder, spec, checkpoint = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
EPOCH, RANKS = 6, int(os.environ["WORLD_SIZE"])


class Module(lightning.LightningModule):
    """The net, with its optimizer. It keeps its losses, and the residual with which it begins."""

    def __init__(self, optim: str):
        super().__init__()
        self.net, self.optim, self.losses, self.residual = net(), optim, list[float](), None

    def on_train_start(self) -> None:
        handle = getattr(self.trainer.strategy, "handle", None)
        self.residual = None if handle is None else handle.residual()

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options = {"momentum": 0.9} if self.optim == "SGD" else {}
        return getattr(torch.optim, self.optim)(self.parameters(), 0.01, **options)


def train(name: str, strategy: Any, optim: str = "AdamW", resumes: str | None = None, **options: Any) -> dict[str, Any]:
    """Train for two epochs. Each ends with a checkpoint."""
    module, saves = Module(optim), ModelCheckpoint(folder / name, "{epoch}", every_n_epochs=1, save_top_k=-1, save_last="link")
    options |= {"strategy": strategy, "accelerator": "cpu", "devices": RANKS, "logger": False, "callbacks": [saves]}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 2}
    trainer = lightning.Trainer(max_epochs=2, **options, **quiet)
    passes = trainer.accumulate_grad_batches
    trainer.fit(module, torch.utils.data.DataLoader(data(8 * RANKS * EPOCH * passes), 8), ckpt_path=resumes)
    found = {"weights": weights(module), "losses": module.losses, "residual": module.residual}
    if isinstance(strategy, GradcompStrategy):
        logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
        assert strategy.handle is not None
        knows = strategy.handle._session.updates.gradients.scaler is not None
        found |= {"logged": logged, "exchanges": strategy.handle.stats()["exchanges"], "knows scaler": knows}
    return found


def by_fabric(spec: str | None) -> dict[str, Any]:
    """Train by Fabric, with the one line of docs/frameworks.md."""
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    bare = net()
    model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), 0.01))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data(8 * RANKS * EPOCH), 8))
    handle = spec and gradcomp.ddp.attach(model._forward_module, spec)
    losses = []
    for number, (x, y) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            loss = cross_entropy(model(x), y)
            fabric.backward(loss)
        if number % 2:
            fabric.clip_gradients(model, optimizer, max_norm=1.0) if spec in (None, "dense") else None
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"weights": weights(bare), "losses": losses, "exchanges": handle and handle.stats()["exchanges"]}


if checkpoint != "-":
    found = {"resumed": train("elsewhere", GradcompStrategy(spec), resumes=checkpoint)}
else:
    found = {}
    for optim in ("AdamW", "SGD"):
        for way, strategy in (("stock", "ddp"), ("dense", GradcompStrategy("dense"))):
            plain = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
            found[f"{way} {optim}"] = train(f"{way}-{optim}", strategy, optim, **plain)
    for way, strategy in (("stock", "ddp"), ("dense", GradcompStrategy("dense"))):
        found[f"{way} scaled"] = train(f"{way}-scaled", strategy, plugins=[MixedPrecision("16-mixed", "cpu")])
        found[f"{way} by fabric"] = by_fabric(None if way == "stock" else way)
    found["whole"] = train("whole", GradcompStrategy(spec))
    found["resumed"] = train("resumed", GradcompStrategy(spec), resumes=str(folder / "whole" / "epoch=0.ckpt"))
    found["clipped"] = train("clipped", GradcompStrategy(spec), gradient_clip_val=1.0)
    half = folder / "clipped" / "half.ckpt"
    if torch.distributed.get_rank() == 0:
        half.symlink_to("epoch=0.ckpt")
    torch.distributed.barrier()
    found["clipped resumed"] = train("again", GradcompStrategy(spec), resumes=str(half), gradient_clip_val=1.0)
    found["accumulated"] = train("accumulated", GradcompStrategy(spec), accumulate_grad_batches=2)
    found["scaled"] = train("scaled", GradcompStrategy(spec), plugins=[MixedPrecision("16-mixed", "cpu")])
    found["RAdam"] = train("radam", GradcompStrategy("auto"), "RAdam")
    found["fabric"] = by_fabric(spec)
finish(folder, found, lightning.__version__)
