"""A real rank: trains a task from its first step to its last, or times the steps of several ways in turns."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradcomp.engine.digests import digests
from laboratory import ranks
from laboratory.cluster.network import INTERFACE
from laboratory.harness.measured import Measured, Rounds, Training
from laboratory.harness.ways import SHARDS, Door, Fitted, is_spec, passes
from laboratory.tasks.table import TASKS, load
from laboratory.tasks.task import Batch, Job, Settings, momentum_of, optimizer_of, rate_of
from laboratory.timing import rotated, threads

# Steps of each way before the rounds that count, and the most steps in which auto may choose before these.
WARM_UP, CHOOSING = 2, 500

# The word of an interface's line at which the kernel counts the bytes that it has sent.
SENT = 9


class Trainee:
    """One way's training on this rank. loss: of the last step, of this rank. passes: the batches of a step."""

    def __init__(self, way: str, fitted: Fitted, batches: Iterator[Batch], loss_of: Callable[[Tensor, Tensor], Tensor]):
        self.way, self.fitted, self.passes = way, fitted, passes(way)
        self._batches, self._loss_of = batches, loss_of
        self._losses: list[Tensor] = []

    @property
    def loss(self) -> float:
        """Return the loss of the last step."""
        return float(sum(map(float, self._losses)))

    def step(self) -> float:
        """Train a step. Return its seconds, without those that make the batches. A GPU has then done its part."""
        batches = [next(self._batches) for _ in range(self.passes)]
        began = time.perf_counter()
        self.fitted.optimizer.zero_grad()
        lefts = reversed(range(self.passes))
        self._losses = [self._pass(x, y, left) for left, (x, y) in zip(lefts, batches, strict=True)]
        self.fitted.optimizer.step()
        if self._losses[0].is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def _pass(self, x: Tensor, y: Tensor, left: int) -> Tensor:
        """Run a batch's forward and backward. left: batches of the step after this one."""
        model: Any = self.fitted.model
        with model.no_sync() if left else contextlib.nullcontext():
            loss = self._loss_of(model(x), y) / self.passes
            loss.backward()
        return loss.detach()


class Rank:
    """A rank that has started. job: the task for this rank alone."""

    def __init__(self, measured: Measured, door: Door):
        self.door, self.task, self.settings = door, TASKS[measured.task], measured.settings
        self._seed = measured.seed if isinstance(measured, Training) else 0
        self._arrays = load(Path(measured.data) if measured.data else None)
        self.job = self._job()
        self.parameters = sum(parameter.numel() for parameter in self.job.model.parameters())

    def trainee(self, way: str, clip: float = 0.0) -> Trainee:
        """Make a way's own model, optimizer and batches."""
        model = copy.deepcopy(self.job.model)  # a new one takes three times as long
        kept = momentum_of(way) if is_spec(way) else 0.0
        optimizer = optimizer_of(self.task, self.settings, model, kept)
        fitted = self.door.fit(way, model, optimizer, self._seed, clip)
        return Trainee(way, fitted, self._job().batches[self.door.rank], self.job.loss)

    def score_of(self, trainee: Trainee) -> float:
        """Compute the score of a trainee's model, on all cores: the other ranks wait."""
        trained: Any = trainee.fitted.model
        self.job.model.load_state_dict(getattr(trained, "module", trained).state_dict())
        with threads(len(os.sched_getaffinity(0))):
            return self.job.score()

    def tell(self, text: str, share: float | None = None) -> None:
        """Let rank 0 say how far the job is."""
        if self.door.rank == 0:
            ranks.tell(text, share)

    def _job(self) -> Job:
        return self.task.make(self.settings, self._seed, self.door.size, self._arrays)


def train(rank: Rank, own: Training) -> dict[str, Any]:
    """Train with as many batches as the settings have steps."""
    trainee, steps = rank.trainee(own.way, own.settings.clip), own.settings.steps
    losses: list[float] = []
    sent: list[int | None] = []
    seconds = 0.0
    for batch in range(trainee.passes, steps + 1, trainee.passes):
        trainee.fitted.optimizer.param_groups[0]["lr"] = rate_of(rank.task, own.settings, batch)
        seconds += trainee.step()
        losses.append(trainee.loss)
        sent.append(trainee.fitted.bytes_sent())
        if len(losses) % 10 == 0:
            rank.tell(f"batch {batch} of {steps}", batch / steps)
    score = rank.score_of(trainee) if rank.door.rank == 0 else math.nan
    return {
        "losses": [round(loss, 6) for loss in rank.door.means(losses, "losses")],
        "sent": sent,
        "scores": [(steps, seconds, score)],
        "parameters": rank.parameters,
        "seconds": round(seconds, 2),
        "weights_are_equal": is_equal(rank.door, digest_of(trainee.fitted.model)),
    }


def digest_of(model: torch.nn.Module) -> float:
    """Compute a number of a model's weights, small enough for means of equal ones to be exact."""
    return float(int(digests(dict(model.named_parameters())).sum()) % 2**32)


def is_equal(door: Door, own: float) -> bool:
    """Decide whether a figure is the same on all ranks."""
    return door.means([float(door.means([own], "own") == [own])], "equal") == [1.0]


def take_rounds(rank: Rank, own: Rounds) -> dict[str, Any]:
    """Time the steps of every way, in turns."""
    trainees = [rank.trainee(way) for way in own.ways]
    fitting = {}
    for done, trainee in enumerate(trainees):
        rank.tell(f"warm-up, {trainee.way}", done / len(trainees))
        choose(rank, trainee)
        seconds, _ = turn_of(trainee, rank.door, WARM_UP)
        fitting[trainee.way] = max(1, min(own.steps, int(own.turn / seconds[-1])))
    found: dict[str, dict[str, Any]] = {way: {"rounds": [], "interface": []} for way in own.ways}
    for at in range(own.rounds):
        for done, i in enumerate(rotated(len(trainees), at)):
            trainee = trainees[i]
            rank.tell(f"round {at + 1} of {own.rounds}, {trainee.way}", (at + done / len(trainees)) / own.rounds)
            seconds, sent = turn_of(trainee, rank.door, fitting[trainee.way])
            found[trainee.way]["rounds"].append(seconds)
            found[trainee.way]["interface"].append(sent)
    for trainee in trainees:
        line = found[trainee.way] | {"bytes": trainee.fitted.bytes_sent(), "loss": trainee.loss}
        if own.launcher == "cluster":
            line["interface_bytes_per_step"] = sum(line["interface"]) / sum(map(len, line["rounds"]))
        if auto := trainee.fitted.stats().get("auto"):
            line["auto"] = auto
        found[trainee.way] = line
    of_all = {"ranks": rank.door.size, "batch": own.settings.batch, "parameters": rank.parameters}
    return {**of_all, "bytes_dense": 4 * rank.parameters, "ways": found}


def turn_of(trainee: Trainee, door: Door, steps: int) -> tuple[list[float], float]:
    """Take some steps. Return the seconds of each batch, and the bytes that a host's interface sent, averaged over the ranks.

    Begin when all ranks are there.
    """
    door.means([0.0], "turn")
    before = interface_bytes()
    seconds = [trainee.step() / trainee.passes for _ in range(steps)]
    sent = interface_bytes() - before
    trainee.fitted.optimizer.zero_grad()  # leave the gradients' memory to the next trainee
    *means, sent_mean = door.means([*seconds, sent], f"times {steps}")
    return means, sent_mean


def interface_bytes() -> float:
    """Read the kernel's counter of what this rank's interface has sent: on an emulated host, its own; 0 where there is none."""
    lines = (line.split() for line in Path("/proc/self/net/dev").read_text().splitlines())
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", INTERFACE) + ":"
    return next((float(words[SENT]) for words in lines if words[0] == wanted), 0.0)


def choose(rank: Rank, trainee: Trainee) -> None:
    """Train until auto has chosen, if this way is auto."""
    for step in range(CHOOSING):
        if trainee.fitted.stats().get("auto", {"choices": 1})["choices"]:
            return
        if step % 10 == 0:
            rank.tell(f"{trainee.way} chooses, step {step}")
        trainee.step()


def join(name: str) -> Door:
    """Join the ranks behind a door."""
    shards = SHARDS.get(name)
    module: Any = importlib.import_module(f"laboratory.harness.by_{name if shards is None else 'fsdp'}")
    door: Door = module.Door() if shards is None else module.Door(shards)
    return door


def main(what: str, fields: str) -> None:
    """Run this process as a rank. All ranks measure, rank 0 reports. what, fields: a Training, or Rounds."""
    given = json.loads(fields)
    given["settings"] = Settings(**given["settings"])
    measured: Measured = Training(**given) if what == Training.__name__ else Rounds(**given)
    door = join(measured.door)
    rank = Rank(measured, door)
    result = train(rank, measured) if isinstance(measured, Training) else take_rounds(rank, measured)
    if door.rank == 0:
        ranks.report(result)
    door.end()
    sys.stderr.flush()
    os._exit(0)  # torch's threads and this process end in no fixed order, and now and then abort it after all is done


if __name__ == "__main__":
    main(*sys.argv[1:])
