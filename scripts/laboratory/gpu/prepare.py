"""`gpu_check --prepare`: downloads, on a machine with a package registry, for a GPU machine without one."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from laboratory.gpu import horovod_build

# Imported name -> downloaded package.
PACKAGES = {
    "pytest": "pytest>=9",
    "hypothesis": "hypothesis",
    "xdist": "pytest-xdist",
    "pybind11": "pybind11>=2.13",
    "cloudpickle": "cloudpickle",
    "psutil": "psutil",
    "yaml": "pyyaml",
    "packaging": "packaging",
    "setuptools": "setuptools>=77",
}


def prepare(folder: Path, python: str) -> list[str]:
    """Download Horovod's sdist, and wheels for that Python. Return the files' names."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    download = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "download", "-d", str(folder)]
    sdist = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod", f"horovod=={horovod_build.VERSION}"]
    subprocess.run([*download, *sdist], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        horovod_build.unpack(folder, Path(scratch))  # fails now if it cannot be patched
    for name, requirement in PACKAGES.items():
        # A folder for each: a package and its dependencies are unpacked together.
        own = [*download[:-1], str(folder / name), "--only-binary=:all:", "--python-version", python, requirement]
        subprocess.run(own, check=True)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def unpack_missing(folder: Path, site: Path, names: Sequence[str]) -> list[str]:
    """Unpack the wheels of those packages that cannot be imported here. Return the wheels' names."""
    unpacked = []
    for name in names:
        if importlib.util.find_spec(name) is not None or (site / name).exists():
            continue
        for wheel in sorted((folder / name).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
            unpacked.append(wheel.name)
    return unpacked
