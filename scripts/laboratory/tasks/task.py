"""The parts of a task: settings, a job for one seed, the source of its data, and the shares of ranks in a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from laboratory.refusal import Refused

Batch = tuple[Tensor, Tensor]
Arrays = dict[str, Tensor]

# The settings that are whole numbers, those in [0, 1), and those that may be 0.
WHOLE = ("steps", "batch", "width", "depth")
BELOW_1 = ("momentum", "beta2", "warmup")
FROM_0 = ("clip", "weight_decay")

# The settings that only some tasks have. They are 0 in the others.
OF_SOME = ("beta2", "depth")


class Settings(NamedTuple):
    """The settings of a training. Each can be set on the command line.

    clip: the longest gradient of a rank; 0: any length. weight_decay: of all parameters. warmup: the share of the steps in
    which the learning rate rises. momentum: AdamW's beta1, too. beta2: AdamW's. depth: blocks of each stage of a residual
    net, layers of a transformer.

    A record is found by the settings that differ from the defaults below: a new setting needs one with which old runs train as
    they did.
    """

    lr: float
    steps: int
    momentum: float
    batch: int
    width: int
    clip: float
    weight_decay: float = 0.0
    warmup: float = 0.05
    beta2: float = 0.0
    depth: int = 0

    def key(self) -> dict[str, float]:
        """Return the part that names a record."""
        return {name: value for name, value in self._asdict().items() if self._field_defaults.get(name) != value}


class Job(NamedTuple):
    """A task with its model and batches, for one seed."""

    model: nn.Module
    batches: list[Iterator[Batch]]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[], float]


class Source(NamedTuple):
    """Data that are prepared once for all processes of a study.

    name: the first part of the prepared file's name. file: the file in --data; None if every Python has the data.
    content: the file's content in words. raw: reads the bytes, from the path of the file. decode: makes arrays of the bytes.
    """

    name: str
    file: str | None
    content: str
    raw: Callable[[Path | None], bytes]
    decode: Callable[[bytes], Arrays]

    @staticmethod
    def read_file(path: Path | None) -> bytes:
        """Read the bytes of a file in --data."""
        assert path is not None
        return path.read_bytes()


class Task(NamedTuple):
    """A task for all seeds.

    make: takes settings, seed, number of ranks, and the arrays of the source (none without a source).
    """

    defaults: Settings
    score_name: str
    higher_is_better: bool
    make: Callable[[Settings, int, int, Arrays], Job]
    about: str
    source: Source | None = None
    optimizer: Literal["sgd", "adamw"] = "sgd"
    schedule: Literal["linear", "cosine"] = "linear"


def shares(count: int, rank: int, ranks: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield this rank's share of every batch of pictures, without end. All ranks draw one order and take different parts."""
    together = batch * ranks
    if together > count:
        raise Refused(f"{ranks} ranks of {batch} pictures are more than the {count} to train on; lower one")
    while True:
        order = torch.randperm(count, generator=generator)
        for first in range(rank * batch, rank * batch + count - together + 1, together):
            yield order[first : first + batch]
