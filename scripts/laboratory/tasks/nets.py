"""Models beside the MLP of digits.py: a convolutional net for digits, and residual nets for colour pictures."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Stages of a residual net for colour pictures.
STAGES = 4


def conv(seed: int, width: int) -> nn.Sequential:
    """Make a net from flat 8 x 8 pictures to ten digits: two convolutions, two linear layers."""
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


class Block(nn.Module):
    """Two convolutions with batch normalisation, and a shortcut past them."""

    def __init__(self, channels: int, to: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, to, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(to)
        self.conv2 = nn.Conv2d(to, to, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(to)
        same = channels == to and stride == 1
        resized = nn.Sequential(nn.Conv2d(channels, to, 1, stride, bias=False), nn.BatchNorm2d(to))
        self.shortcut = nn.Identity() if same else resized

    def forward(self, x: Tensor) -> Tensor:
        inside = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inside + self.shortcut(x))


def residual(seed: int, width: int, depth: int) -> nn.Sequential:
    """Make a net from colour pictures to ten classes: four stages of `depth` residual blocks.

    The first convolution halves the pictures. A stage has twice the channels of the one before, on pictures half as large.
    """
    torch.manual_seed(seed)
    channels = [width, *(width << stage for stage in range(STAGES) for _ in range(depth))]
    strides = [2 if i and i % depth == 0 else 1 for i in range(STAGES * depth)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        *(Block(a, b, each) for a, b, each in zip(channels[:-1], channels[1:], strides, strict=True)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels[-1], 10),
    )
