"""A text as bytes for a transformer."""

from __future__ import annotations

import hashlib
import math
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from laboratory.options import Refused
from laboratory.tasks.task import Arrays, Batch, Job, Settings, Source

# The values of a byte, the bytes of a sequence, and the size of an attention head.
BYTES, LENGTH, HEAD = 256, 96, 32

# The standard deviation of the first weights.
DEVIATION = 0.02

# The folders of Python's library that are not among its sources.
OTHERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

# Held-out sequences that are read at once.
CHUNK = 64


def decode(content: bytes) -> Arrays:
    """Cut off the last tenth for the test."""
    text = torch.from_numpy(numpy.frombuffer(content, numpy.uint8).copy())
    first = 9 * len(text) // 10
    if len(text) - first <= LENGTH:
        raise Refused(f"the text has {len(text)} bytes; its last tenth must be longer than the {LENGTH} of a sequence")
    return {"train": text[:first].clone(), "held_out": text[first:].clone()}


SHAKESPEARE = Source("shakespeare", "tinyshakespeare.txt", "text, read as bytes", decode)


def python_sources() -> bytes:
    """Join the sources of Python's library, tests aside. Their digests order them, and leave each content once."""
    found = {}
    for path in (root := Path(sysconfig.get_path("stdlib"))).rglob("*.py"):
        if not OTHERS & {*path.relative_to(root).parts}:
            content = path.read_bytes()
            found[hashlib.sha256(content).hexdigest()] = content
    return b"".join(content for _, content in sorted(found.items()))


PYTHON = Source(f"python-{platform.python_version()}", "", "", decode, python_sources)


def batches(train: Tensor, rank: int, ranks: int, batch: int, seed: int, length: int = LENGTH) -> Iterator[Batch]:
    """Yield this rank's share of every batch, without end. All ranks draw the same positions and take different ones.

    No batch waits for the GPU on which the text may lie.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1, device=train.device)
    while True:
        drawn = torch.randint(len(train) - length, (ranks * batch,), generator=generator)
        own = drawn[rank * batch : (rank + 1) * batch].to(train.device, non_blocking=True)
        part = train[own.unsqueeze(1) + offsets]
        yield part[:, :-1], part[:, 1:]


def loss(logits: Tensor, text: Tensor) -> Tensor:
    """Return the mean cross-entropy of the bytes."""
    return functional.cross_entropy(logits.flatten(0, 1), text.flatten())


def perplexity(model: nn.Module, held_out: Tensor) -> float:
    """Return e to the mean loss of a held-out byte. Each sequence starts afresh, as in training."""
    count = (len(held_out) - 1) // LENGTH
    every = torch.stack([held_out[LENGTH * i : LENGTH * (i + 1) + 1] for i in range(count)])
    with torch.no_grad():
        losses = [loss(model(part[:, :-1]), part[:, 1:]) * len(part) for part in every.split(CHUNK)]
    mean = float(sum(losses)) / count
    return math.exp(min(mean, 700.0)) if math.isfinite(mean) else math.nan


class Layer(nn.Module):
    """Attention to earlier bytes, then two linear layers, each with a normalisation before it and a way past it."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(self.norm1(x)).unflatten(2, (3, -1, HEAD))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        inside: Tensor = self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return x + inside


class Transformer(nn.Module):
    """A model that predicts, after each byte of a sequence, the next one. The seed decides the weights."""

    def __init__(self, seed: int, width: int, depth: int):
        super().__init__()
        if width % HEAD:
            raise Refused(f"width={width} must be a multiple of {HEAD}, the size of an attention head")
        torch.manual_seed(seed)
        self.bytes = nn.Embedding(BYTES, width)
        self.places = nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=DEVIATION)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, sequences: Tensor) -> Tensor:
        x = self.bytes(sequences) + self.places.weight[: sequences.shape[1]]
        logits: Tensor = self.out(self.norm(self.layers(x)))
        return logits


def job(settings: Settings, seed: int, ranks: int, arrays: Arrays) -> Job:
    """Make the prediction of a text's next byte."""
    model = Transformer(seed, settings.width, settings.depth)
    train, held_out = arrays["train"].long(), arrays["held_out"].long()
    parts = [batches(train, rank, ranks, settings.batch, seed) for rank in range(ranks)]
    return Job(model, parts, loss, lambda: perplexity(model, held_out))
