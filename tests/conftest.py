"""Fixtures of all tests: devices, threads, and settings under which Hypothesis repeats itself."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from devices import DEVICES, HAS_GPU

from gradcomp.native import extension

hypothesis.settings.register_profile(
    "gradcomp",
    deadline=None,  # timings of a shared machine say nothing
    derandomize=True,
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("few", hypothesis.settings.get_profile("gradcomp"), max_examples=3)  # under slow tools
hypothesis.settings.load_profile("gradcomp")

SANITIZED = os.environ.get("GRADCOMP_SIMT_SANITIZED") == "1"


def pytest_report_header() -> str:
    if HAS_GPU:
        return f"devices: cpu, simt (CUDA kernels emulated), cuda ({torch.cuda.get_device_name()})"
    reason = "no GPU" if extension.BUILT_WITH_CUDA else "built without CUDA"
    return f"devices: cpu, simt (CUDA kernels emulated); NOT on cuda: {reason}"


@pytest.fixture(scope="session")
def emulator_folder() -> Iterator[str]:
    """Build the emulator's modules once for all tests."""
    import build

    folder = str(build.build(sanitize=SANITIZED))
    sys.path.insert(0, folder)
    yield folder
    sys.path.remove(folder)


@pytest.fixture(scope="session")
def emulator(emulator_folder: str) -> Any:
    """The CUDA kernels, compiled for the emulator."""
    return importlib.import_module("gradcomp_simt")


@pytest.fixture
def simt(emulator_folder: str) -> Any:
    """The kernels that test the emulator itself."""
    module = importlib.import_module("simt_selftest")
    module.set_order(True)
    return module


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device of the test's tensors. On simt they lie in main memory, and the emulated CUDA kernels work on them."""
    if request.param == "simt":
        monkeypatch.setattr(extension, "native", request.getfixturevalue("emulator"))
    torch.manual_seed(0)
    yield torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch on one thread: for small tensors, threads on a busy machine mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
