"""Ranks with other processors compute the same: kernels of AVX-512, AVX2 and the default target agree to the last bit."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from gradcomp.native import extension

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parents[1]
# The compiler's options for each target.
TARGETS = {"default": "", "avx2": "-mavx2", "avx512f": "-mavx512f"}


def has(target: str) -> bool:
    return target == "default" or target in Path("/proc/cpuinfo").read_text()


def module(target: str) -> Path:
    """Build the kernels for this target alone."""
    sys.path.insert(0, str(TESTS / "simt"))
    import build

    flags = f"-DGRADCOMP_ONE_TARGET {TARGETS[target]}".strip()
    options = ["-DGRADCOMP_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_CXX_FLAGS={flags}"]
    folder = build.cmake(TESTS.parent, f"native-{target}", build.compiler(), options)
    return folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


@functools.cache
def digests(path: Path) -> dict[str, str]:
    folders = [TESTS, TESTS / "helpers", TESTS.parent]
    done = subprocess.run(
        [sys.executable, "-m", "step_digests", str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "target", [pytest.param(each, marks=[] if each == "default" else [pytest.mark.long]) for each in TARGETS]
)
def test_a_target_has_the_results_of_the_installed_module(target: str) -> None:
    if not has(target):
        pytest.skip(f"this machine has no {target}; run this where one has")
    installed = digests(Path(str(extension.native.__file__)))
    assert len(installed) > 40
    assert digests(module(target)) == installed
