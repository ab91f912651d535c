"""Ranks with other processors compute the same: kernels of AVX-512, AVX2 and the default target agree to the last bit."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradcomp.native import extension

pytestmark = pytest.mark.long

TESTS = Path(__file__).resolve().parents[1]
# The compiler's options for each target.
TARGETS = {"default": "", "avx2": "-mavx2", "avx512f": "-mavx512f"}


def has(target: str) -> bool:
    return target == "default" or target in Path("/proc/cpuinfo").read_text()


def module(target: str) -> Path:
    """Build the kernels for this target alone."""
    import build

    return build.extension(f"native-{target}", "Release", f"-DGRADCOMP_ONE_TARGET {TARGETS[target]}".strip())


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


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_has_the_results_of_the_installed_module(target: str) -> None:
    if not has(target):
        pytest.skip(f"this machine has no {target}; run this where one has")
    installed = digests(Path(str(extension.native.__file__)))
    assert len(installed) > 40
    assert digests(module(target)) == installed
