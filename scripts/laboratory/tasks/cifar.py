"""CIFAR-10: pictures of 32 x 32 pixels in ten classes, decoded from JPEG; shifted and mirrored at random for training."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from laboratory.options import Refused
from laboratory.tasks.task import Arrays, Batch, Job, Settings, Source, accuracy, shares

# The height and width of a picture, the black pixels around it that a shift can uncover, and the shifts in each direction.
SIDE, MARGIN, SHIFTS = 32, 4, 9

# Mean and standard deviation of red, green and blue over the training pictures, of 255.
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]) * 255
DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]) * 255

# Stages of the residual net.
STAGES = 4


def decode(content: bytes) -> Arrays:
    """Decode the pictures: uint8[pictures, 32, 32, 3] and labels, for training and for the test."""
    from PIL import Image

    try:
        with numpy.load(io.BytesIO(content)) as held:
            jpeg, ends, labels, test = (held[name] for name in ("jpeg", "ends", "label", "test"))
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise Refused(f"{SOURCE.file} cannot be read ({error}); it must hold {SOURCE.content}") from None
    begins = [0, *ends[:-1].tolist()]
    pictures = numpy.empty((len(ends), SIDE, SIDE, 3), numpy.uint8)
    for i, (begin, end) in enumerate(zip(begins, ends.tolist(), strict=True)):
        with Image.open(io.BytesIO(jpeg[begin:end].tobytes())) as opened:
            pictures[i] = numpy.asarray(opened.convert("RGB"))
    x, y = torch.from_numpy(pictures), torch.from_numpy(labels.astype(numpy.int64))
    held_out = torch.from_numpy(test.astype(bool))
    return {"train_x": x[~held_out], "train_y": y[~held_out], "test_x": x[held_out], "test_y": y[held_out]}


SOURCE = Source(
    "cifar",
    "cifar10-25k.npz",
    "CIFAR-10 as numpy arrays: `jpeg`, the bytes of all JPEG files; `ends`, the end of each file; `label`; `test`",
    decode,
)


def normalised(pictures: Tensor) -> Tensor:
    """Turn uint8[n, rows, columns, 3] into float32[n, 3, rows, columns]. The memory keeps its order, for fast convolutions."""
    mean, deviation = (each.to(pictures.device, non_blocking=True) for each in (MEAN, DEVIATION))
    return pictures.float().sub_(mean).div_(deviation).permute(0, 3, 1, 2)


def windows(pictures: Tensor) -> Tensor:
    """Add the margin, and view every shift of every picture: uint8[pictures, shifts down, shifts right, rows, 3 * columns]."""
    padded = functional.pad(pictures, (0, 0, MARGIN, MARGIN, MARGIN, MARGIN))
    picture, row, pixel, _ = padded.stride()
    return padded.as_strided((len(padded), SHIFTS, SHIFTS, SIDE, 3 * SIDE), (picture, row, pixel, row, 1))


def batches(views: Tensor, labels: Tensor, rank: int, ranks: int, batch: int, seed: int) -> Iterator[Batch]:
    """Yield this rank's share of every batch, without end. All ranks draw the shifts and mirrors of all.

    No batch waits for the GPU on which the pictures may lie.
    """
    generator, own = torch.Generator().manual_seed(seed), slice(rank * batch, (rank + 1) * batch)
    for chosen in shares(len(labels), rank, ranks, batch, generator):
        shifts = torch.randint(SHIFTS, (ranks * batch, 2), generator=generator)[own]
        mirrored = torch.randint(2, (ranks * batch,), generator=generator).bool()[own]
        picture, shift, flipped = (each.to(views.device, non_blocking=True) for each in (chosen, shifts, mirrored))
        cut = views[picture, shift[:, 0], shift[:, 1]].unflatten(2, (SIDE, 3))
        yield normalised(torch.where(flipped[:, None, None, None], cut.flip(2), cut)), labels[picture]


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


def job(settings: Settings, seed: int, ranks: int, arrays: Arrays) -> Job:
    """Make CIFAR-10 with a residual net. It halves pictures at once: in full size a step would take three times as long.

    The simulated ranks share one model, so the running statistics of its batch normalisation see the batches of all ranks. On a
    cluster each rank keeps its own. The statistics of a training batch are one rank's, as on a cluster.
    """
    model = residual(seed, settings.width, settings.depth)
    views = windows(arrays["train_x"])
    parts = [batches(views, arrays["train_y"], rank, ranks, settings.batch, seed) for rank in range(ranks)]
    return Job(model, parts, functional.cross_entropy, lambda: accuracy(model, arrays, normalised))
