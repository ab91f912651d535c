"""A process group for trainings that are alone in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from gradcomp.native import kernels


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step's failure be unknown until somebody waits for the device."""
    if getattr(request, "param", True):
        monkeypatch.setattr(kernels, "may_have_failed", lambda verdicts, step: True)
