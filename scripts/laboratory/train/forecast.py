"""A forecast of step times by the ranks themselves: they measure links, kernels and the model's work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

import gradcomp
from gradcomp.core.requests import Reduce
from gradcomp.prediction import peers, workload
from gradcomp.prediction.link import Measured
from laboratory.tasks import training
from laboratory.train import links, ways
from laboratory.train.start import Started

# The part of a model that a long message has, and how often it is sent. Where ranks share cores, some wait for them.
PART, TIMES = 2, 5


def predicted(started: Started, wanted: Sequence[str]) -> dict[str, float]:
    """Predict the seconds of a batch by each of these ways that can be predicted, averaged over the ranks.

    All ranks measure the same at the same time, as they train at the same time: on one machine they share its cores. In each
    step they wait for one another once, as every exchange makes them wait.
    """
    door, job = started.door, started.job
    specs = [way for way in wanted if ways.is_spec(way)]
    specs += [way for way in wanted if peers.is_peer(way)]
    network = door.network()
    own = links.measure(network, torch.device("cpu"), started.parameters // PART, TIMES)
    figures = door.means([figure for line in own.lines.values() for figure in line], "links")
    measured = Measured({kind: (figures[2 * i], figures[2 * i + 1]) for i, kind in enumerate(own.lines)})
    # Made beforehand: a trainee's seconds do not contain the making of its batches.
    batches = iter(list(itertools.islice(job.batches[door.rank], workload.WARM_UP + workload.COUNTED)))

    def loss() -> Tensor:
        network.start(Reduce(torch.zeros(1)), "forecast.step")()
        x, y = next(batches)
        return job.loss(job.model(x), y)

    optimizer = training.optimizer_of(started.task, started.settings, job.model)

    def together(_spec: str, _part: float) -> None:
        door.means([0.0], "forecast")

    found = gradcomp.predict(job.model, door.size, link=measured, optimizer=optimizer, loss=loss, specs=specs, tell=together)
    seconds = door.means([line.seconds for line in found.lines], "forecasts")
    return {line.spec: mean for line, mean in zip(found.lines, seconds, strict=True)}
