"""Fixtures of all tests: devices, threads, and settings under which Hypothesis repeats itself."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
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

# Packages without which tests are skipped. --complete makes that an error.
OPTIONAL = ("horovod.torch", "matplotlib", "mypy", "PIL", "scipy", "sklearn", "yaml")

SANITIZED = os.environ.get("GRADCOMP_SIMT_SANITIZED") == "1"


def is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None  # "horovod" alone would find the folder tests/horovod
    except ModuleNotFoundError:  # its parent is
        return True


MISSING = [module.partition(".")[0] for module in OPTIONAL if is_missing(module)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--complete", action="store_true", help="fail if a package is missing whose tests would be skipped")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--complete") and MISSING:
        raise pytest.UsageError(f"--complete, but tests of {', '.join(MISSING)} would be skipped: run scripts/setup")


def pytest_report_header() -> list[str]:
    cuda = torch.cuda.get_device_name() if HAS_GPU else "no GPU" if extension.BUILT_WITH_CUDA else "built without CUDA"
    devices = "devices: cpu, simt (CUDA kernels emulated)" + (f", cuda ({cuda})" if HAS_GPU else f"; NOT on cuda: {cuda}")
    return [devices, f"NOT installed, so their tests are skipped: {', '.join(MISSING)}"] if MISSING else [devices]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
    """Skip a file that imports a missing package."""
    report: Any = yield
    excinfo = report.call.excinfo if hasattr(report, "call") else None  # --lf makes reports without a call
    return skip_if_missing(report, excinfo and excinfo.value.__cause__, collector.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Skip a test that imports a missing package."""
    report = yield
    return skip_if_missing(report, call.excinfo and call.excinfo.value, item.nodeid)


def skip_if_missing(report: Any, error: BaseException | None, name: str) -> Any:
    """Make the failed import of a missing package a skip, which the summary shows with its reason."""
    package = str(error.name).partition(".")[0] if isinstance(error, ImportError) else ""
    if report.failed and package in MISSING:
        report.outcome = "skipped"
        report.longrepr = (name, None, f"Skipped: NOT tested: {package} is not installed; scripts/setup installs it")
    return report


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
    return importlib.import_module("simt_selftest")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device of the test's tensors. On simt they lie in main memory, and the emulated CUDA kernels work on them."""
    if request.param == "simt":
        monkeypatch.setattr(extension, "native", request.getfixturevalue("emulator"))
    torch.manual_seed(0)
    yield torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    """A process group of torch's for trainings that are alone in the test's own process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch on one thread: for small tensors, threads on a busy machine mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
