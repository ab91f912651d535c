"""The machine of the check: its GPU, programs and packages, and the folders under build/, which git ignores."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from laboratory.machine import ROOT

BUILD = ROOT / "build" / "gpu"

# A Horovod that was built elsewhere, if one is carried along.
HOROVOD = ROOT / "build" / "gpu-horovod"

# A copy of gradcomp with the extension for this GPU, and the results.
PACKAGE, RESULTS = BUILD / "package", BUILD / "results"

# Where CUDA's programs lie, if not on PATH. A star stands for a version.
CUDA_PLACES = ("usr/local/cuda/bin", "usr/local/cuda/compute-sanitizer", "opt/nvidia/nsight-compute/*")

# Packages that every call needs.
PACKAGES = ("torch", "numpy", "pybind11", "pytest", "hypothesis")
CARRY = "install it; without a package registry, carry its wheel along, which `pip download` fetches"
REMEDIES = {
    "torch": "it must come from the machine: use the Python that has a torch for CUDA",
    "nvcc": "install the CUDA toolkit, or name its folder in CUDA_HOME",
    "cmake": "install it",
    "a C++ compiler": "install g++, or name one in CXX",
    "Python.h": "install the headers of this Python (python3-dev)",
}


class Gpu(NamedTuple):
    """A GPU as nvidia-smi describes it."""

    name: str
    driver: str
    capability: str
    memory: str

    @property
    def arch(self) -> str:
        """Return the architecture as CMake and nvcc number it."""
        return self.capability.replace(".", "")


def find_gpu(program: str = "nvidia-smi") -> Gpu | None:
    """Find the first GPU of this machine."""
    words = [program, "--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    fields = [part.strip() for part in done.stdout.partition("\n")[0].split(",")]
    return Gpu(*fields) if done.returncode == 0 and len(fields) == 4 else None


def missing(on_gpu: bool, has: Callable[[str], bool] | None = None) -> list[str]:
    """List the necessities of every call that this machine lacks, each with the remedy."""
    has = has or is_there
    wanted = [*PACKAGES, "cmake", "a C++ compiler", "Python.h", *(["nvcc"] if on_gpu else [])]
    return [f"{name} ({REMEDIES.get(name, CARRY)})" for name in wanted if not has(name)]


def is_there(name: str) -> bool:
    """Look for a package, a program or a header, without running anything."""
    if name in PACKAGES:
        return importlib.util.find_spec(name) is not None
    if name == "a C++ compiler":
        return shutil.which(os.environ.get("CXX") or "c++") is not None
    if name == "Python.h":
        return (Path(sysconfig.get_paths()["include"]) / name).exists()
    return program(name) is not None


def program(name: str, root: Path = Path("/")) -> str | None:
    """Find a program: on PATH, beside the toolkit that CUDA_HOME names, or in one of CUDA's places."""
    home = os.environ.get("CUDA_HOME")
    folders = [Path(home) / "bin"] if home else []
    folders += [folder for place in CUDA_PLACES for folder in sorted(root.glob(place), reverse=True)]
    return shutil.which(name) or next((str(folder / name) for folder in folders if (folder / name).is_file()), None)


def environment() -> dict[str, str]:
    """Return variables by which every command finds the builds of the check before installed packages, and the laboratory."""
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(PACKAGE), str(HOROVOD), str(ROOT / "scripts"), before]))
    variables = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if nvcc := program("nvcc"):
        variables |= {"CUDACXX": nvcc, "PATH": os.pathsep.join([os.environ.get("PATH", ""), str(Path(nvcc).parent)])}
    return variables
