"""Ray Train, with a worker that is killed and goes on: python examples/ray_train.py [--dies-at 55]

All workers save: each has a residual of its own. On several machines, --storage names a folder that all of them see.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.nn.functional import cross_entropy

import gradcomp


def worker(settings: dict[str, Any]) -> None:
    """Train as one of the workers. Ray Train calls it again on all of them after one has failed."""
    rank, ranks = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    truth = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)))  # DistributedDataParallel
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = gradcomp.ddp.attach(model, "topk:ratio=0.05")

    began, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            files = Path(folder).glob("*.pt")
            states = {int(file.stem): torch.load(file, weights_only=True, map_location="cpu") for file in files}
        own = states.get(rank, states[0])
        began = own["step"]
        model.load_state_dict(own["model"])
        optimizer.load_state_dict(own["optimizer"])
        handle.load_state_dict([state["gradcomp"] for state in states.values()])
        print(f"rank {rank} goes on after step {began}", flush=True)

    for step in range(began + 1, settings["steps"] + 1):
        if step == settings["dies_at"] and rank == 1 and not began:  # in its first life
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(ranks * step + rank))  # drawn anew from the step
        optimizer.zero_grad()
        loss = cross_entropy(model(x), (x @ truth).argmax(1))
        loss.backward()
        optimizer.step()
        if step % settings["every"] == 0:
            metrics = {"step": step, "loss": loss.item(), "compression": handle.stats()["payload_ratio"]}
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            with tempfile.TemporaryDirectory() as folder:
                torch.save({**state, "gradcomp": handle.state_dict()}, Path(folder, f"{rank}.pt"))
                ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))  # Ray joins the ranks' folders


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints (default 10)")
    parser.add_argument("--dies-at", type=int, default=0, help="the step in which a worker is killed, once")
    parser.add_argument("--storage", type=Path, help="the folder of checkpoints (default: Ray's own)")
    options = parser.parse_args()
    trainer = TorchTrainer(
        worker,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=options.storage, failure_config=FailureConfig(max_failures=3)),
    )
    print(f"ends with {trainer.fit().metrics}")
