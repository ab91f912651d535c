"""Versions of CUDA: which of the extension, the driver and torch fit together, and the sentence at import where they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradcomp.native import cuda_versions, extension
from gradcomp.native.cuda_versions import misfit

# Imports a door with an extension that claims to have kernels of CUDA 13.0, whatever this one has.
IMPORT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("gradcomp._native", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.built_with_cuda, module.cuda_version = True, 13000
sys.modules["gradcomp._native"] = module
import gradcomp.ddp
from gradcomp.native import cuda_versions
print(cuda_versions.driver_version())
"""


@pytest.mark.parametrize(
    "runtime,driver,torchs,said",
    [
        (13000, 13000, "13.0", ""),
        (13000, 13010, "13.0", ""),
        (13010, 13000, "13.0", ""),  # compiled code runs under any driver of its major version
        (12080, 13000, "12.8", ""),
        (13000, 13000, None, ""),  # a torch for CPUs: arrays may be CuPy's
        (0, 12080, "12.8", ""),  # no kernels
        (13000, 0, "12.8", ""),  # no driver, and so no GPU
        (13000, 12080, "12.8", "the driver serves CUDA 12.8 at most"),
        (13000, 12080, "13.0", "the driver serves CUDA 12.8 at most"),
        (13000, 13000, "12.8", "but torch with CUDA 12.8: build gradcomp with an nvcc of CUDA 12"),
        (12080, 13000, "13.0", "were built with CUDA 12.8, but torch with CUDA 13.0"),
    ],
)
def test_versions_that_do_not_fit_are_named(runtime: int, driver: int, torchs: str | None, said: str) -> None:
    found = misfit(runtime, driver, torchs)
    assert said in found and bool(said) == bool(found)


def imported_under(driver: int | None, folder: Path) -> subprocess.CompletedProcess[str]:
    """Import gradcomp where a driver says that it serves this CUDA, or where there is none."""
    found = dict(os.environ)
    if driver is not None:
        source = folder / "driver.c"
        source.write_text(f"int cuDriverGetVersion(int* version) {{ *version = {driver}; return 0; }}\n")
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(folder / "libcuda.so.1")], check=True)
        found["LD_LIBRARY_PATH"] = str(folder)
    command = [sys.executable, "-c", IMPORT, str(extension.native.__file__)]
    return subprocess.run(command, capture_output=True, text=True, env=found)


def test_an_import_says_that_no_kernel_will_run_under_an_older_driver(tmp_path: Path) -> None:
    done = imported_under(12080, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "12080\n"
    assert "GradcompWarning: gradcomp's kernels were built with CUDA 13.0, but the driver serves CUDA 12.8" in done.stderr


@pytest.mark.parametrize("driver", [13000, 13020])
def test_an_import_says_nothing_where_versions_fit(driver: int, tmp_path: Path) -> None:
    done = imported_under(driver, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{driver}\n", "")


def test_a_driver_that_is_missing_or_odd_has_no_version(tmp_path: Path) -> None:
    assert cuda_versions.driver_version(str(tmp_path / "libcuda.so.1")) == 0
    odd = tmp_path / "odd.c"
    odd.write_text("int other(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", str(odd), "-o", str(tmp_path / "odd.so")], check=True)
    assert cuda_versions.driver_version(str(tmp_path / "odd.so")) == 0


def test_versions_are_written_as_people_do() -> None:
    assert [cuda_versions.in_words(version) for version in (12080, 13000, 11020)] == ["12.8", "13.0", "11.2"]
