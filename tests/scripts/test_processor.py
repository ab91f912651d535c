"""lab train --processor: whose processor time is whose, and what is compared with a spec's kernels."""

from __future__ import annotations

import threading
import time

import pytest

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
        "topk": {"processor": {"rounds": [[0.115, 0.010], [0.135, 0.020]], "kernels": 0.010}},
    }
    found = launch.processor_times(every, "topk")
    assert found["over_kernels"] == pytest.approx(1.5) and found["network_ms"] == pytest.approx(15)
    assert (found["own_ms"], found["kernels_ms"]) == (pytest.approx(125), 10)
    assert launch.processor_times(every, "none")["over_kernels"] is None
