"""Trains a small GPT by Hugging Face's Trainer on these ranks: torchrun by_transformers.py FOLDER SPEC CHECKPOINT|-."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from trainers import finish, weights
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, __version__

from gradcomp.integrations.transformers import attach

folder, spec, checkpoint = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
STEPS = 12


class Losses(TrainerCallback):
    """Keeps what is logged, and the residual with which a training begins."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.logs: list[dict[str, float]] = []
        self.residual: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.residual = None if self.handle is None else self.handle.residual()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        self.logs.append(dict(logs))


def train(name: str, spec: str | None, optim: str, passes: int, clip: float, resumes: str | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    rows = [torch.roll(torch.arange(16) * 4, i % 16) for i in range(16 * STEPS)]
    options: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_steps": STEPS // 2}
    options |= {"optim": optim, "gradient_accumulation_steps": passes, "max_grad_norm": clip, "learning_rate": 3e-3}
    options |= {"max_steps": STEPS, "logging_steps": 1, "per_device_train_batch_size": 4}
    args = TrainingArguments(output_dir=str(folder / name), **options)
    losses = Losses()
    trainer = Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows], callbacks=[losses])
    if spec is not None:
        losses.handle = attach(trainer, spec)
    trainer.train(resume_from_checkpoint=resumes)
    logged = [each for each in losses.logs if "loss" in each]
    exchanges = None if spec is None else losses.handle.stats()["exchanges"]
    return {"weights": weights(model), "logs": logged, "residual": losses.residual, "exchanges": exchanges}


if checkpoint != "-":
    found = {"resumed": train("elsewhere", spec, "adamw_torch", 1, 0.0, checkpoint)}
else:
    warnings.filterwarnings("error", "gradcomp|topk")
    found = {}
    for optim in ("adamw_torch", "sgd"):
        for way, of_way in (("stock", None), ("dense", "dense")):
            found[f"{way} {optim}"] = train(f"{way}-{optim}", of_way, optim, 2, 1.0)
    found["whole"] = train("whole", spec, "adamw_torch", 1, 0.0)
    found["resumed"] = train("resumed", spec, "adamw_torch", 1, 0.0, str(folder / "whole" / f"checkpoint-{STEPS // 2}"))
    found["accumulated"] = train("accumulated", spec, "adamw_torch", 2, 0.0)
    found["clipped"] = train("clipped", spec, "adamw_torch", 1, 1.0)
    found["clipped resumed"] = train("again", spec, "adamw_torch", 1, 1.0, str(folder / "clipped" / f"checkpoint-{STEPS // 2}"))
finish(folder, found, __version__)
