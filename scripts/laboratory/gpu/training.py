"""Trainings of ResNet-9 in bf16 on CIFAR-10 by simulated ranks: python -m laboratory.gpu.training --help.

All specs train with the first seed, then all with the next one: a run that ends early leaves as many of each. A spec that fails
leaves its error in its place.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from laboratory.gpu import captured
from laboratory.harness.measured import Training
from laboratory.tasks import cifar
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Arrays, Job, Settings, accuracy

# The rows of README's and of docs/which-spec.md's tables; `stock` is the mean of the gradients.
SPECS = ("stock", "topk", "blocks", "orq", "sdagc")
RANKS = 4
# The factor of the net's outputs.
SCALE = 0.125
# By device: the width of the net, the pictures of a rank, the epochs, the seeds.
SIZES = {"cuda": (64, 128, 20, (1, 2, 3)), "cpu": (8, 8, 1, (1, 2))}


class Residual(nn.Module):
    """Two convolutions, and a shortcut past them."""

    def __init__(self, channels: int):
        super().__init__()
        self.inside = nn.Sequential(*convolution(channels, channels), *convolution(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        inside: Tensor = self.inside(x)
        return x + inside


def convolution(channels: int, to: int) -> list[nn.Module]:
    """Make a convolution with batch normalisation."""
    return [nn.Conv2d(channels, to, 3, padding=1, bias=False), nn.BatchNorm2d(to), nn.ReLU(inplace=True)]


def resnet9(width: int, seed: int) -> nn.Sequential:
    """Make the net: eight convolutions, and a linear layer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *convolution(3, width),
        *convolution(width, 2 * width),
        nn.MaxPool2d(2),
        Residual(2 * width),
        *convolution(2 * width, 4 * width),
        nn.MaxPool2d(2),
        *convolution(4 * width, 8 * width),
        nn.MaxPool2d(2),
        Residual(8 * width),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * width, 10, bias=False),
    )


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of the scaled outputs."""
    return cross_entropy(outputs.float() * SCALE, labels)


def job(settings: Settings, seed: int, ranks: int, arrays: Arrays) -> Job:
    """Make the net and every rank's pictures."""
    model = resnet9(settings.width, seed).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    views, labels = cifar.windows(arrays["train_x"]), arrays["train_y"]
    parts = [cifar.batches(views, labels, rank, ranks, settings.batch, seed) for rank in range(ranks)]
    return Job(model, parts, loss, lambda: accuracy(model, arrays, cifar.normalised))


def made_up(count: int, held_out: int) -> Arrays:
    """Draw pictures of nothing, for a dry run."""
    x = torch.randint(256, (count + held_out, cifar.SIDE, cifar.SIDE, 3), dtype=torch.uint8)
    y = torch.randint(10, (count + held_out,))
    return {"train_x": x[:count], "train_y": y[:count], "test_x": x[count:], "test_y": y[count:]}


def main() -> None:
    """Train under every spec with every seed. Write the record's settings and trainings after each."""
    parser = argparse.ArgumentParser(prog="python -m laboratory.gpu.training", description=__doc__)
    parser.add_argument("--device", choices=SIZES, required=True)
    parser.add_argument("--data", type=Path, metavar="FILE", help=f"{cifar.SOURCE.file}; without it, pictures of nothing")
    parser.add_argument("--seconds", type=float, required=True, help="after which no training is to be under way")
    parser.add_argument("--out", type=Path, required=True, help="the record")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    read = cifar.decode(options.data.read_bytes()) if options.data else made_up(64, 16)
    arrays = {name: array.to(device) for name, array in read.items()}
    width, batch, epochs, seeds = SIZES[device.type]
    steps = epochs * len(arrays["train_y"]) // (RANKS * batch)
    own = Settings(lr=0.2, steps=steps, momentum=0.9, batch=batch, width=width, clip=0, weight_decay=0.0005, warmup=0.15)
    task = TASKS["cifar"]._replace(make=job)
    found = {
        "settings": {
            "model": "ResNet-9",
            "autocast": "bfloat16",
            "simulated_ranks": RANKS,
            "trained_on": len(arrays["train_y"]),
            "tested_on": len(arrays["test_y"]),
            "epochs": epochs,
            **own.key(),
        },
        "trainings": [],
    }
    every = [
        ({"spec": spec, "seed": seed}, partial(captured.train, Training("resnet9", spec, seed, RANKS, own), task, arrays))
        for seed in seeds
        for spec in SPECS
    ]
    captured.in_turn(found, every, "spec", end, options.out)


if __name__ == "__main__":
    main()
