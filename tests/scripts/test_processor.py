"""lab train --processor: whose processor time is whose, and what is compared with a spec's kernels."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from gradcomp.core.requests import World
from gradcomp.prediction import trial
from laboratory.tasks.task import Settings
from laboratory.train import launch, processor


def burn(seconds: float) -> None:
    """Keep a core busy, without its waiting for one."""
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


def test_other_threads_are_the_networks() -> None:
    done, leave = threading.Event(), threading.Event()

    def work() -> None:
        burn(0.3)
        done.set()
        leave.wait()

    before = processor.used()
    thread = threading.Thread(target=work)
    thread.start()
    burn(0.1)
    done.wait()
    found = processor.used().since(before)
    leave.set()
    thread.join()
    assert 0.1 <= found.own < 0.25 and 0.3 <= found.network < 0.45


def test_kernels_are_compared_with_what_is_above_none() -> None:
    every = {
        "none": {"processor": {"rounds": [[0.100, 0.0], [0.120, 0.0]], "kernels": None}},
        "topk": {"processor": {"rounds": [[0.115, 0.010], [0.135, 0.020]], "kernels": {"warm": 0.010, "cold": 0.015}}},
    }
    found = launch.processor_times(every, "topk")
    assert found["over_warm_kernels"] == pytest.approx(1.5) and found["over_cold_kernels"] == pytest.approx(1.0)
    assert (found["own_ms"], found["network_ms"]) == (pytest.approx(125), pytest.approx(15))
    assert (found["warm_kernels_ms"], found["cold_kernels_ms"]) == (10, 15)
    assert launch.processor_times(every, "none")["over_cold_kernels"] is None


@pytest.mark.parametrize("optimizer, settings", [("sgd", {"momentum": 0.9}), ("adamw", {"momentum": 0.9, "beta2": 0.99})])
def test_kernels_alone_take_the_momentum_over(
    optimizer: str, settings: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps that they are compared with do."""
    momenta, whole = [], trial.try_out

    def quick(*given: Any, **options: Any) -> Any:
        momenta.append(options["momentum"])
        return whole(*given, trial.Effort(3, 3, 0.0), **options)

    monkeypatch.setattr(trial, "try_out", quick)
    door = SimpleNamespace(
        rank=0, size=1, means=lambda own, name: own, network=lambda: SimpleNamespace(world=World(0, 2, (0, 1)))
    )
    task, job = SimpleNamespace(optimizer=optimizer), SimpleNamespace(model=nn.Linear(300, 40))
    started: Any = SimpleNamespace(
        door=door, task=task, job=job, settings=Settings(lr=0.1, steps=1, batch=1, width=1, clip=0.0, **settings)
    )
    assert min(processor.kernels(started, "topk") or [0]) > 0
    assert [momentum.taken for momentum in momenta] == [True, True]
    assert processor.kernels(started, "stock") is None
