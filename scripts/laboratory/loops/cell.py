"""A cell of a table of loops: a training by a door, a spec and an optimizer on two real ranks; its score and warnings."""

from __future__ import annotations

import itertools
import math
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from laboratory.tasks import digits, texts
from laboratory.tasks.task import Arrays, accuracy

# Pictures of a rank in a batch, and the width of the net, which takes some 3 ms a step.
BATCH, WIDTH = 32, 16
# Grey values' mean and standard deviation. Without them SGD stays where it begins for half of the steps.
MEAN, DEVIATION = 0.3, 0.38

# A rank's sequences in a batch, width and depth of the transformer, and the held-out sequences that its loss is taken of.
SEQUENCES, TEXT_WIDTH, DEPTH, HELD_OUT = 4, 64, 2, 128

# The beginning of an error that is no refusal of gradcomp's.
FAILED, PACKAGE = "FAILED: ", Path(gradcomp.__file__).parent


class Key(NamedTuple):
    """A cell's place in the table. spec: empty for the door alone."""

    case: str
    door: str
    kind: str
    spec: str
    seed: int
    steps: int


class Cell:
    """The parts of a training of digits, for the cases: net, batches, optimizer, and the model to call (whole).

    rates: the learning rate by kind of optimizer. inner: the optimizer before it was wrapped.
    """

    _made = itertools.count()
    rates: ClassVar = {"sgd": 0.05, "adamw": 0.002}

    def __init__(self, key: Key, arrays: Arrays):
        self.key, self.steps = key, key.steps
        self.number = next(self._made)
        self.rank, self.size = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE"))
        self.whole: Any = None
        self.optimizer: Any = None
        self.handle: Any = None
        self.inner: Any = None
        self.net: Any
        self.generator: Any
        self.begin(arrays)

    def begin(self, arrays: Arrays) -> None:
        """Make the data, the batches and the net. arrays: of a task that reads a file."""
        self.data = {
            name: (each - MEAN) / DEVIATION if each.is_floating_point() else each for name, each in digits.load().items()
        }
        self.batches = digits.batches(self.data, self.rank, self.size, BATCH, self.key.seed)
        self.net = digits.conv(self.key.seed, WIDTH)

    @property
    def by_ddp(self) -> bool:
        return self.key.door == "ddp"

    def make(self, parameters: Any = None, **options: Any) -> torch.optim.Optimizer:
        """Make the kind's optimizer, of all parameters that are not frozen unless some are given."""
        given = [*(self.net.parameters() if parameters is None else parameters)]
        given = [each for each in given if each.requires_grad]
        if self.key.kind == "sgd":
            return torch.optim.SGD(given, **{"lr": self.rates["sgd"], "momentum": 0.9, **options})
        return torch.optim.AdamW(given, **{"lr": self.rates["adamw"], **options})

    def wrap(self, optimizer: Any = None, ddp: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Put the net and the optimizer through the door. ddp: options of DDP; options: of Horovod's optimizer."""
        self.inner = self.make() if optimizer is None else optimizer
        if self.by_ddp:
            self.whole, self.optimizer = DistributedDataParallel(self.net, **(ddp or {})), self.inner
            if self.key.spec:
                self.handle = gradcomp.ddp.attach(self.whole, self.key.spec)
            return
        self.whole = self.net
        self.optimizer, self.handle = self.wrapped(self.inner, self.net, **options)

    def wrapped(self, inner: Any, net: nn.Module, **options: Any) -> tuple[Any, Any]:
        """Wrap an optimizer for Horovod. Each cell has names of its own, since Horovod joins operations by name."""
        import horovod.torch as hvd

        import gradcomp.horovod

        own = {id(each) for group in inner.param_groups for each in group["params"]}
        named = [(f"{self.number}.{name}", each) for name, each in net.named_parameters() if id(each) in own]
        if not self.key.spec:
            return hvd.DistributedOptimizer(inner, named, **options), None
        made = gradcomp.horovod.DistributedOptimizer(inner, named, self.key.spec, **options)
        return made, made.compression

    def loss(self, model: Any = None) -> Tensor:
        """Run the next batch forward."""
        x, y = next(self.batches)
        return functional.cross_entropy((self.whole if model is None else model)(x), y)

    def backward(self) -> None:
        """Run the next batch forward and backward."""
        self.optimizer.zero_grad()
        self.loss().backward()

    def synchronized_step(self, step: Any = None) -> None:
        """Step after a change of the exchanged gradients: under Horovod without an exchange of its own."""
        with nullcontext() if self.by_ddp else self.optimizer.skip_synchronize():
            (step or self.optimizer.step)()

    def synchronize(self) -> None:
        """Wait for the exchanged gradients."""
        if not self.by_ddp:
            self.optimizer.synchronize()

    def train(self, steps: int | None = None) -> None:
        """Take steps in the usual way."""
        for _ in range(self.steps if steps is None else steps):
            self.backward()
            self.optimizer.step()

    def score(self, net: nn.Module | None = None) -> float:
        """Return the percentage of test pictures that are classified correctly."""
        trained: Any = self.net if net is None else net
        return accuracy(trained, self.data)


class TextCell(Cell):
    """The parts of a training of a small GPT on text. Its score is the loss of held-out text."""

    rates: ClassVar = {"sgd": 0.1, "adamw": 0.002}

    def begin(self, arrays: Arrays) -> None:
        """Make the batches and the transformer."""
        self.data = {name: each.long() for name, each in arrays.items()}
        self.batches = texts.batches(self.data["train"], self.rank, self.size, SEQUENCES, self.key.seed)
        self.net = texts.Transformer(self.key.seed, TEXT_WIDTH, DEPTH)

    def loss(self, model: Any = None) -> Tensor:
        """Run the next batch forward."""
        x, y = next(self.batches)
        return texts.loss((self.whole if model is None else model)(x), y)

    def score(self, net: nn.Module | None = None) -> float:
        """Return the mean loss of a held-out byte."""
        text = self.data["held_out"][: HELD_OUT * texts.LENGTH + 1]
        return math.log(texts.perplexity(self.net if net is None else net, text))


class UnclippedCell(TextCell):
    """The same where nothing clips, at a smaller rate of SGD."""

    rates: ClassVar = {**TextCell.rates, "sgd": 0.05}


@dataclass(frozen=True)
class Case:
    """A usual loop.

    play: takes all steps; returns the score unless it is the cell's. kinds: of optimizers that it is for. doors: that can do
    it. more: specs beside those of all cases. cell: of its task. before: what comes before model and optimizer go through the
    door, unless it does that itself (wraps=False). optimizer: another than the kind's. of_ddp, of_horovod: options of the door.
    """

    play: Callable[[Any], Any] = Cell.train
    kinds: tuple[str, ...] = ("sgd", "adamw")
    doors: tuple[str, ...] = ("ddp", "horovod")
    more: tuple[str, ...] = ()
    cell: type[Cell] = Cell
    before: Callable[[Any], object] = lambda cell: None
    wraps: bool = True
    optimizer: Callable[[Any], Any] = Cell.make
    of_ddp: Mapping[str, Any] = field(default_factory=dict)
    of_horovod: Mapping[str, Any] = field(default_factory=dict)

    def score(self, key: Key, arrays: Arrays) -> float:
        """Train, and return the score."""
        cell = self.cell(key, arrays)
        self.before(cell)
        if self.wraps:
            cell.wrap(self.optimizer(cell), self.of_ddp, **self.of_horovod)
        found = self.play(cell)
        return float(cell.score() if found is None else found)


def of_cell(key: Key, case: Case, arrays: Arrays) -> dict[str, Any]:
    """Train a cell. Return its score, the warnings of this rank, and the refusal, if it was refused."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        score, refused = math.nan, ""
        try:
            score = case.score(key, arrays)
        except Exception as error:
            raised_by = traceback.extract_tb(error.__traceback__)[-1].filename
            refused = f"{'' if PACKAGE in Path(raised_by).parents else FAILED}{type(error).__name__}: {error}"
    said = [*dict.fromkeys(str(each.message) for each in seen)]
    return {"key": list(key), "score": None if math.isnan(score) else round(score, 3), "refused": refused, "warned": said}
