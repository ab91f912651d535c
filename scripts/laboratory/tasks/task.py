"""The parts of a task: settings, data, optimizer, learning rates, the job of one seed, and the shares of ranks in a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import gradcomp
from laboratory.options import Refused

Batch = tuple[Tensor, Tensor]
Arrays = dict[str, Tensor]

# The settings that are whole numbers, those in [0, 1), and those that may be 0.
WHOLE = ("steps", "batch", "width", "depth")
BELOW_1 = ("momentum", "beta2", "warmup")
FROM_0 = ("clip", "weight_decay")

# The settings that only some tasks have. They are 0 in the others.
OF_SOME = ("beta2", "depth")

# The share of the steps after which a linear schedule falls, and the part of the learning rate that is left at the end.
DECAY_FROM, DECAY_TO = 0.6, 0.1

# The part of the learning rate that a cosine schedule leaves at the end.
COSINE_TO = 0.01

# Test pictures that are classified at once.
CHUNK = 250


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

    name: the first part of the prepared file's name. file: the file in --data. content: its content in words. found: reads data
    of this machine in place of a file.
    """

    name: str
    file: str
    content: str
    decode: Callable[[bytes], Arrays]
    found: Callable[[], bytes] | None = None


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
    optimizer: Literal["sgd", "adamw", "muon"] = "sgd"
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


def accuracy(model: nn.Module, arrays: Arrays, prepared: Callable[[Tensor], Tensor] = torch.Tensor.float) -> float:
    """Return the percentage of test pictures that are classified correctly. The model is in training mode again afterwards."""
    model.eval()
    with torch.no_grad():
        parts = zip(arrays["test_x"].split(CHUNK), arrays["test_y"].split(CHUNK), strict=True)
        right = sum(int((model(prepared(x)).argmax(1) == y).sum()) for x, y in parts)
    model.train()
    return 100 * right / len(arrays["test_y"])


def linear_rate(step: int, steps: int, warmup: float) -> float:
    """Return the part of the learning rate that applies in a step, counted from 1: it rises, stays, and falls linearly."""
    rising = min(1.0, step / max(1.0, warmup * steps))
    left = max(0.0, (step / steps - DECAY_FROM) / (1 - DECAY_FROM))
    return rising * (1 - (1 - DECAY_TO) * left)


def cosine_rate(step: int, steps: int, warmup: float) -> float:
    """Return the part of the learning rate that applies in a step, counted from 1: it rises, then falls by half a cosine."""
    rising = max(1.0, warmup * steps)
    if step <= rising:
        return step / rising
    return COSINE_TO + (1 - COSINE_TO) * (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2


RATES = {"linear": linear_rate, "cosine": cosine_rate}


def rate_of(task: Task, settings: Settings, step: int) -> float:
    """Return the learning rate of a step, counted from 1."""
    return settings.lr * RATES[task.schedule](step, settings.steps, settings.warmup)


class Muon(torch.optim.AdamW):
    """Muon for the matrices of a transformer's layers, at AdamW's rate, and AdamW for all else."""

    def __init__(self, named: Iterator[tuple[str, nn.Parameter]], lr: float, betas: tuple[float, float], **options: Any):
        every = dict(named)
        inner = {name: each for name, each in every.items() if each.ndim == 2 and "layers." in name}
        super().__init__([each for name, each in every.items() if name not in inner], lr, betas, **options)
        decay = options["weight_decay"]
        self._inner = torch.optim.Muon(inner.values(), lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")

    def step(self, closure: Any = None) -> Any:
        """Step all weights."""
        self._inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self._inner.step()
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self._inner.zero_grad(set_to_none)
        super().zero_grad(set_to_none)


def optimizer_of(
    task: Task, settings: Settings, model: nn.Module, kept: float = 0.0, fused: bool | None = None
) -> torch.optim.Optimizer:
    """Make a task's optimizer. kept: the momentum that the spec keeps; SGD has none beside it. fused: faster with many layers.

    A momentum repeats the gradient of each step, 1 / (1 - momentum) times in all, and SGD's repeats the weight decay as well. A
    spec's momentum does not see the weight decay, which is made larger by this factor instead. AdamW decays weights directly.
    """
    decay = settings.weight_decay
    if task.optimizer != "sgd":
        kind = Muon if task.optimizer == "muon" else torch.optim.AdamW
        parameters, betas = model.named_parameters(), (settings.momentum, settings.beta2)
        return kind(parameters, settings.lr, betas, weight_decay=decay, fused=fused)
    momentum = 0.0 if kept else settings.momentum
    return torch.optim.SGD(model.parameters(), settings.lr, momentum, weight_decay=decay / (1 - kept), fused=fused)


def momentum_of(spec: str) -> float:
    """Return the momentum that the spec keeps itself, beside an optimizer that has none.

    Where updates are exchanged, a spec's momentum takes the place of the optimizer's own, which is hidden.
    """
    traits = gradcomp.make(spec).traits
    return 0.0 if traits.acts_on_updates else traits.momentum


def clip(grads: Sequence[Tensor], longest: float) -> None:
    """Shorten a rank's gradient to this length where it is longer. 0 leaves every gradient alone."""
    if longest:
        length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        for grad in grads:
            grad.mul_((longest / length).clamp(max=1))
