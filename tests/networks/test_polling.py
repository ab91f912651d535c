"""The pauses between two looks at an operation of Horovod: short where a GPU idles meanwhile, and never growing beyond."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from gradcomp.core.requests import Reduce
from gradcomp.networks import horovod as network


class Sent(torch.Tensor):
    """A tensor that says that it lies on a GPU, as Horovod would return one."""

    is_cuda = True


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of a wait for an operation that ends at the twelfth look."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(hvd, "poll", lambda handle: len(slept) == 12)
    monkeypatch.setattr(hvd, "allreduce_async_", lambda tensor, **options: tensor)
    monkeypatch.setattr(hvd, "synchronize", lambda handle: torch.zeros(1))
    return slept


def wait_for(tensor: Any) -> None:
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1, process_set_id=0)
    network.HorovodNetwork(alone).start(Reduce(tensor, 1.0), "0.0")()


def test_pauses_double_up_to_a_millisecond_for_tensors_in_main_memory(pauses: list[float]) -> None:
    wait_for(torch.zeros(3))
    assert pauses[:3] == [20e-6, 40e-6, 80e-6] and pauses[-1] == 1e-3


def test_a_gpu_never_idles_for_longer_than_a_tenth_of_that(pauses: list[float]) -> None:
    wait_for(torch.zeros(3).as_subclass(Sent))
    assert pauses[:3] == [20e-6, 40e-6, 80e-6] and set(pauses[3:]) == {100e-6}
