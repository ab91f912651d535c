"""Trains a small GPT by Hugging Face's Trainer and FSDP2: torchrun by_transformers_fsdp.py FOLDER. Four ranks are two pairs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import ParallelismConfig
from trainers import finish, take_cpus_for_gpus
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, __version__

import gradcomp.fsdp

folder = Path(sys.argv[1])
STEPS = 8


class Compress(TrainerCallback):
    """What a user adds, as docs/frameworks.md has it, and a record of the logs."""

    def __init__(self, spec: str | None, weights: str | None):
        self.spec, self.weights, self.handle, self.logs = spec, weights, None, list[dict[str, float]]()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        if self.spec is not None:
            self.handle = gradcomp.fsdp.attach(model, self.spec, weights=self.weights)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        self.logs.append(dict(logs))


def train(name: str, spec: str | None, weights: str | None = None, resumes: str | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    rows = [torch.roll(torch.arange(16) * 4, i % 16) for i in range(32 * STEPS)]
    options: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_steps": STEPS // 2, "dataloader_pin_memory": False}
    options |= {"max_steps": STEPS, "logging_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    if os.environ["WORLD_SIZE"] == "4":
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    options |= {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"]}, "learning_rate": 3e-3}
    compress = Compress(spec, weights)
    args = TrainingArguments(output_dir=str(folder / name), **options)
    trainer = Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows], callbacks=[compress])
    trainer.train(resume_from_checkpoint=resumes and str(folder / resumes / f"checkpoint-{STEPS // 2}"))
    found = torch.cat([each.detach().full_tensor().flatten() for each in trainer.model.parameters()])
    losses, norms = ([each[name] for each in compress.logs if "loss" in each] for name in ("loss", "grad_norm"))
    stats = compress.handle and compress.handle.stats()
    return {"weights": found, "losses": losses, "norms": norms, "stats": stats}


take_cpus_for_gpus()
found = {str(spec): train(str(spec), spec) for spec in (None, "dense", "blocks")}
found["gathered"] = train("gathered", "blocks", "blocks:bits=8")
found["resumed"] = train("again", "blocks", "blocks:bits=8", "gathered")
if os.environ["WORLD_SIZE"] == "4":
    found["topk"] = train("topk", "topk:ratio=0.1", "blocks:bits=8")
finish(folder, found, __version__)
