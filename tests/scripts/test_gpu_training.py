"""gpu_check's trainings: simulated ranks that step on a device, in the order of seeds, until their time is over."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in import StandIn, stand_in
from torch import nn

from laboratory.gpu import captured, training
from laboratory.gpu.stages import Record
from laboratory.harness import simulated
from laboratory.harness.measured import Training
from laboratory.tasks.task import Batch, Job, Settings, Task

# Steps, of which the first make state, and the tenth would compare weights.
RANKS, STEPS, WARM = 2, 9, 3
SETTINGS = Settings(lr=0.1, steps=STEPS, momentum=0.9, batch=4, width=0, clip=0)
TASK = Task(SETTINGS, "accuracy in %", True, lambda *arguments: job(), "")


def net(device: str = "cpu") -> nn.Sequential:
    """Make a net whose first weights lie as channels_last does. A stand-in's device takes no module, but tensors."""
    model, generator = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Flatten(), nn.Linear(72, 4)), torch.Generator().manual_seed(1)
    for layer in (model[0], model[2]):
        for name, each in [*layer.named_parameters()]:
            drawn = torch.randn(each.shape, generator=generator) / 8
            ordered = drawn.contiguous(memory_format=torch.channels_last) if each.dim() == 4 else drawn
            layer.register_parameter(name, nn.Parameter(ordered.to(device)))
    return model


def batch(step: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(RANKS * step + rank)
    return torch.randn(4, 2, 5, 5, generator=generator), torch.randint(4, (4,), generator=generator)


def job() -> Job:
    parts = [(batch(step, rank) for step in range(STEPS)) for rank in range(RANKS)]
    return Job(net(), [iter(part) for part in parts], nn.functional.cross_entropy, lambda: 50.0)


def stepped(own: Training, device: str, mode: StandIn | None = None) -> tuple[list[torch.Tensor], list[str]]:
    """Let the ranks step on gradients of the CPU. Return the weights, and what waited for the device in later steps."""
    ranks = simulated.Updates(own, job()._replace(model=net(device)), TASK)
    like, waits = net(), list[str]()
    passes = simulated.Plain(like, nn.functional.cross_entropy, 0.0)
    for step in range(STEPS):
        with torch.no_grad():
            for each, there in zip(like.parameters(), ranks.models[0].parameters(), strict=True):
                each.copy_(there.as_subclass(torch.Tensor))
        grads = [[each.to(device) for each in passes(*batch(step, rank))[1]] for rank in range(RANKS)]
        if mode and step >= WARM:
            mode.waits.clear()
        ranks.step(grads)
        waits += mode.waits if mode and step >= WARM else []
    ranks.close()
    return [each.detach().as_subclass(torch.Tensor) for each in ranks.models[0].parameters()], waits


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "sdagc:density=0.1", "orq"])
def test_ranks_that_exchange_updates_step_on_a_device_as_on_a_cpu(
    spec: str, emulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no step waits for it."""
    own = Training("a net", spec, 1, RANKS, SETTINGS)
    wanted, _ = stepped(own, "cpu")
    step = simulated.Replica.step
    with stand_in(emulator, monkeypatch) as mode:

        def on_thread(self: simulated.Replica, grads: Any) -> None:
            with mode:  # which is a thread's own
                step(self, grads)

        monkeypatch.setattr(simulated.Replica, "step", on_thread)
        monkeypatch.setattr(simulated, "copy", SimpleNamespace(deepcopy=lambda model: net("cuda")))
        found, waits = stepped(own, "cuda", mode)
    assert waits == []
    start = [*net().parameters()]
    for one, other, before in zip(found, wanted, start, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert not torch.equal(other, before)


def test_a_training_counts_what_its_exchange_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Specs with a residual step by themselves; the mean of gradients is exchanged without gradcomp."""
    arrays, steps = {"train_x": torch.zeros(1)}, list[str]()
    for kind in (simulated.Gradients, simulated.Updates):
        real = kind.step
        monkeypatch.setattr(kind, "step", lambda self, grads, real=real: steps.append(type(self).__name__) or real(self, grads))
    found = {spec: captured.train(Training("a net", spec, 1, RANKS, SETTINGS), TASK, arrays) for spec in training.SPECS}
    assert steps == [kind for kind in ("Gradients", "Updates", "Gradients", "Updates", "Updates") for _ in range(STEPS)]
    assert all((one["accuracy"], one["steps"]) == (50.0, STEPS) and one["seconds"] > 0 for one in found.values())
    assert found["stock"]["compression"] == 1 < found["blocks"]["compression"] < found["orq"]["compression"]


class Cycle:
    """Refers to itself, as what a process's first training leaves does."""

    def __init__(self) -> None:
        self.own = self


def test_what_the_last_training_left_is_freed_before_the_next_one() -> None:
    """Freed while a graph is captured, a GPU's memory would spoil it."""
    left, living = weakref.ref(Cycle()), list[bool]()
    gc.disable()
    try:
        task = TASK._replace(make=lambda *arguments: living.append(left() is not None) or job())  # type: ignore[func-returns-value]
        captured.train(Training("a net", "stock", 1, RANKS, SETTINGS), task, {"train_x": torch.zeros(1)})
    finally:
        gc.enable()
    assert living == [False]


def test_what_would_not_end_in_time_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A spec takes as long as with the last seed; one that has not run, as long as the longest."""
    record: Record = {"trainings": []}

    def run(seconds: float) -> Record:
        time.sleep(seconds)
        return {"seconds": seconds}

    takes = {"fast": 0.02, "slow": 1.0, "new": 0.0}
    every = [({"spec": spec, "seed": seed}, partial(run, seconds)) for seed in (1, 2) for spec, seconds in takes.items()]
    captured.in_turn(record, every, "spec", time.monotonic() + 1.6, None)
    outcomes = [{*one} - {"spec", "seed"} for one in record["trainings"]]
    assert outcomes == [{"seconds"}, {"seconds"}, {"left_out"}, {"seconds"}, {"left_out"}, {"left_out"}]
    assert not capsys.readouterr().out
