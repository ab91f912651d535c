"""What a call of gpu_check needs, looked for in a moment: all that is missing is said at once, before anything runs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

from laboratory.gpu import place

# Packages that every call needs, and others that some stages use.
REQUIRED_PACKAGES = ("torch", "numpy", "pybind11", "pytest", "hypothesis")
OPTIONAL_PACKAGES = ("cupy", "horovod", "xdist", "cloudpickle", "psutil", "yaml", "packaging", "setuptools", "ninja")

PREPARE = "run `scripts/gpu_check --prepare` where there is a package registry, and carry build/gpu-prepare"
REMEDIES = {
    "torch": "it must come from the machine: use the Python that has a torch for CUDA",
    "nvcc": "install the CUDA toolkit, or name its folder in CUDA_HOME",
    "cmake": "install it",
    "a C++ compiler": "install g++, or name one in CXX",
    "Python.h": "install the headers of this Python (python3-dev)",
}


def missing(on_gpu: bool, has: Callable[[str], bool] | None = None) -> list[str]:
    """List what every call needs and this machine lacks, each with the remedy."""
    has = has or is_there
    wanted = [*REQUIRED_PACKAGES, "cmake", "a C++ compiler", "Python.h", *(["nvcc"] if on_gpu else [])]
    return [f"{name} ({REMEDIES.get(name, PREPARE)})" for name in wanted if not has(name)]


def is_there(name: str) -> bool:
    """Look for a package, a program or a header, without running anything."""
    if name in (*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES):
        return importlib.util.find_spec(name) is not None or (place.SITE / name).exists()
    if name == "a C++ compiler":
        return shutil.which(os.environ.get("CXX") or "c++") is not None
    if name == "Python.h":
        return (Path(sysconfig.get_paths()["include"]) / name).exists()
    return place.program(name) is not None
