"""A transformer that reads bytes: pre-norm layers, causal attention, learned positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from laboratory.refusal import Refused

# The values of a byte, and the bytes of a sequence.
BYTES, LENGTH = 256, 96

# The size of an attention head.
HEAD = 32

# The standard deviation of the first weights.
DEVIATION = 0.02


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
