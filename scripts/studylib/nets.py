"""The study's two models beside that of scripts/digits.py: a convolutional net for pictures, an LSTM for characters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EMBEDDING = 64


def conv(seed: int, width: int) -> nn.Sequential:
    """8 x 8 grey pictures, flat, to ten digits: two convolutions, two linear layers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * width, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, 10),
    )


class Characters(nn.Module):
    """Says, after each character of a sequence, which one comes next."""

    def __init__(self, seed: int, characters: int, width: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(characters, EMBEDDING)
        self.memory = nn.LSTM(EMBEDDING, width, batch_first=True)
        self.out = nn.Linear(width, characters)

    def forward(self, sequences: Tensor) -> Tensor:
        remembered, _ = self.memory(self.embedding(sequences))
        said: Tensor = self.out(remembered)
        return said
