"""A training of ResNet-9 in bf16 on CIFAR-10 by simulated ranks: python -m laboratory.gpu.training --help. Specs take turns.

On a GPU a rank's gradient is computed by a CUDA graph: launches would take longer than the kernels. A spec that fails leaves
its error in its place.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradcomp
from laboratory.gpu.stages import attempt
from laboratory.tasks import cifar
from laboratory.tasks.task import Arrays, accuracy

SPECS = ("none", "sdagc", "orq", "topk:ratio=0.001")
RANKS, SEED = 4, 1
RATE, MOMENTUM, DECAY = 0.2, 0.9, 0.0005
# The share of the steps in which the learning rate rises; then it falls to 0. The factor of the net's outputs.
WARMUP, SCALE = 0.15, 0.125
# By device: the width of the net, the pictures of a rank, the epochs.
SIZES = {"cuda": (64, 128, 20), "cpu": (4, 8, 1)}
# Steps before a graph is captured.
WARM = 3


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


class Gradients:
    """The gradients of a model for one batch after another. On a GPU they are those of a captured graph, in its memory."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor):
        self._model, self._x, self._y = model, x.clone(), y.clone()
        self._parameters = list(model.parameters())
        self._graph = self._captured() if x.is_cuda else None

    def _compute(self) -> list[Tensor]:
        with torch.autocast(self._x.device.type, torch.bfloat16, cache_enabled=False):
            outputs = self._model(self._x) * SCALE
        return list(torch.autograd.grad(cross_entropy(outputs.float(), self._y), self._parameters))

    def _captured(self) -> torch.cuda.CUDAGraph:
        kept = {name: value.clone() for name, value in self._model.state_dict().items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self._compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._found = self._compute()
        self._model.load_state_dict(kept)  # the running means have seen a batch
        return graph

    def of(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return a batch's gradients, as tensors that nobody else has."""
        self._x.copy_(x)
        self._y.copy_(y)
        if self._graph is None:
            return self._compute()
        self._graph.replay()
        return [each.clone() for each in self._found]


def train(spec: str, arrays: Arrays, device: torch.device, epochs: int, seed: int) -> dict[str, Any]:
    """Train under a spec; none: on the mean of the gradients."""
    width, batch, _ = SIZES[device.type]
    model = resnet9(width, seed).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    named = dict(model.named_parameters())
    momentum = 0.0 if spec != "none" and gradcomp.make(spec).traits.momentum else MOMENTUM
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum, weight_decay=DECAY)
    simulation = None
    if spec != "none":
        shapes = {name: tuple(each.shape) for name, each in named.items()}
        known: Any = {"device": device, "optimizer": optimizer, "named_parameters": list(named.items())}
        simulation = gradcomp.Simulation(spec, shapes, RANKS, seed, **known)
    views, labels = cifar.windows(arrays["train_x"]), arrays["train_y"]
    batches = [cifar.batches(views, labels, rank, RANKS, batch, seed) for rank in range(RANKS)]
    gradients = Gradients(model, *next(cifar.batches(views, labels, 0, RANKS, batch, seed)))
    steps, sent, began = epochs * len(labels) // (RANKS * batch), 0, time.perf_counter()
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = RATE * min(step / (WARMUP * steps), (steps + 1 - step) / ((1 - WARMUP) * steps), 1)
        grads = _of_all(gradients, batches, list(named))
        if simulation is None:
            updates = {name: torch.stack([each[name] for each in grads]).mean(0) for name in named}
        else:
            updates = simulation.step(grads)
            sent += simulation.bytes_sent[0]
        for name, update in updates.items():
            named[name].grad = update
        optimizer.step()
    score = accuracy(model, arrays, cifar.normalised)  # waits for the GPU
    dense = 4 * steps * sum(each.numel() for each in named.values())
    seconds = round(time.perf_counter() - began, 1)
    return {"accuracy": round(score, 2), "compression": round(dense / sent) if sent else 1, "steps": steps, "seconds": seconds}


def _of_all(gradients: Gradients, batches: list[Iterator[Any]], names: list[str]) -> list[dict[str, Tensor]]:
    return [dict(zip(names, gradients.of(*next(of_rank)), strict=True)) for of_rank in batches]


def made_up(count: int, held_out: int) -> Arrays:
    """Draw pictures of nothing, for a dry run."""
    x = torch.randint(256, (count + held_out, cifar.SIDE, cifar.SIDE, 3), dtype=torch.uint8)
    y = torch.randint(10, (count + held_out,))
    return {"train_x": x[:count], "train_y": y[:count], "test_x": x[count:], "test_y": y[count:]}


def main() -> None:
    """Train under every spec. Write the record's settings and trainings after each."""
    parser = argparse.ArgumentParser(prog="python -m laboratory.gpu.training", description=__doc__)
    parser.add_argument("--device", choices=SIZES, required=True)
    parser.add_argument("--pictures", type=Path, metavar="FILE", help=f"{cifar.SOURCE.file}; without it, pictures of nothing")
    parser.add_argument("--out", type=Path, required=True, help="the record")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    read = cifar.decode(options.pictures.read_bytes()) if options.pictures else made_up(256, 64)
    arrays = {name: array.to(device) for name, array in read.items()}
    _, batch, epochs = SIZES[device.type]
    settings = {
        "model": "ResNet-9",
        "autocast": "bfloat16",
        "simulated_ranks": RANKS,
        "pictures_of_a_rank": batch,
        "trained_on": len(arrays["train_y"]),
        "tested_on": len(arrays["test_y"]),
        "epochs": epochs,
        "seed": SEED,
    }
    found = {"settings": settings, "trainings": []}
    for spec in SPECS:
        attempt(found, "trainings", {"spec": spec}, partial(train, spec, arrays, device, epochs, SEED), options.out)


if __name__ == "__main__":
    main()
