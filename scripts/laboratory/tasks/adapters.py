"""Adapters (LoRA) that teach a trained transformer another text: it has read Python's library, and is to read Shakespeare."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from laboratory.options import Refused
from laboratory.tasks import texts
from laboratory.tasks.task import Arrays, Job, Settings, Source, cosine_rate
from laboratory.tasks.texts import Transformer, perplexity

# The transformer: its width and depth, and its training, which is the same for all seeds.
WIDTH, DEPTH, STEPS, BATCH, RATE = 128, 2, 1000, 16, 0.004

# The rank of an adapter.
RANK = 8

# What the name of a weight of the transformer begins with among the arrays.
MARK = "trained."


class Adapter(nn.Module):
    """A linear layer that stays as it is, and the product of two thin matrices beside it. At first this product is 0."""

    def __init__(self, layer: nn.Linear, generator: torch.Generator):
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(RANK, layer.in_features, generator=generator) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        beside = functional.linear(functional.linear(x, self.down), self.up)
        whole: Tensor = self.layer(x) + beside
        return whole


def freeze(model: nn.Module) -> None:
    """Make buffers of all parameters."""
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            delattr(module, name)
            module.register_buffer(name, parameter.detach())


def trained(train: Tensor) -> Arrays:
    """Train the transformer on a text, and return its weights."""
    model = Transformer(0, WIDTH, DEPTH)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.95), fused=True)
    of_library = texts.batches(train.long(), 0, 1, BATCH, 0)
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = RATE * cosine_rate(step, STEPS, 0.05)
        x, y = next(of_library)
        texts.loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"lab study: {step:,} of {STEPS:,} steps of the transformer that adapters are for", file=sys.stderr)
    return {MARK + name: each.detach() for name, each in model.named_parameters()}


def decode(content: bytes) -> Arrays:
    """Read the text, and train the transformer on the other one."""
    return texts.decode(content) | trained(texts.decode(texts.python_sources())["train"])


SOURCE = Source(f"adapted-{texts.PYTHON.name}", texts.SHAKESPEARE.file, texts.SHAKESPEARE.content, decode)


def adapted(seed: int, arrays: Arrays) -> Transformer:
    """Make the trained transformer, with adapters of all linear layers within its layers. They alone are parameters."""
    model = Transformer(0, WIDTH, DEPTH)
    model.load_state_dict({name.removeprefix(MARK): each for name, each in arrays.items() if name.startswith(MARK)})
    freeze(model)
    generator = torch.Generator().manual_seed(seed)
    for module in [*model.layers.modules()]:
        for name, layer in [*module.named_children()]:
            if isinstance(layer, nn.Linear):
                setattr(module, name, Adapter(layer, generator))
    return model


def job(settings: Settings, seed: int, ranks: int, arrays: Arrays) -> Job:
    """Make the adaptation."""
    if settings.width != WIDTH:
        raise Refused(f"width={settings.width} is not the {WIDTH} of the transformer that adapters are for; leave width out")
    model, train, held_out = adapted(seed, arrays), arrays["train"].long(), arrays["held_out"].long()
    parts = [texts.batches(train, rank, ranks, settings.batch, seed) for rank in range(ranks)]
    return Job(model, parts, texts.loss, lambda: perplexity(model, held_out))
