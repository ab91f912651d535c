"""The folders of the check, all of them under build/, which git ignores, and the programs and libraries of this machine."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from pathlib import Path

from laboratory.machine import ROOT

BUILD = ROOT / "build" / "gpu"

# Downloads of --prepare.
PREPARED = ROOT / "build" / "gpu-prepare"

# A copy of gradcomp with the extension for this GPU. The checkout's own stays as it is.
PACKAGE = BUILD / "package"

# Unpacked wheels that this machine lacked.
SITE = BUILD / "site"

# Builds of Horovod, without and with NCCL.
HOROVOD, HOROVOD_NCCL = BUILD / "horovod", BUILD / "horovod-nccl"

LOGS = BUILD / "logs"
RESULTS = BUILD / "results"

# Where CUDA's programs lie, if not on PATH. A star stands for a version.
CUDA_PLACES = ("usr/local/cuda/bin", "usr/local/cuda/compute-sanitizer", "opt/nvidia/nsight-compute/*")


def program(name: str, root: Path = Path("/")) -> str | None:
    """Find a program: on PATH, beside the toolkit that CUDA_HOME names, or in one of CUDA's places."""
    home = os.environ.get("CUDA_HOME")
    folders = [Path(home) / "bin"] if home else []
    folders += [folder for place in CUDA_PLACES for folder in sorted(root.glob(place), reverse=True)]
    return shutil.which(name) or next((str(own / name) for own in folders if (own / name).is_file()), None)


def environment(horovod: Path = HOROVOD) -> dict[str, str]:
    """Return variables by which every command finds the builds of the check before installed packages, and the laboratory."""
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(PACKAGE), str(horovod), str(SITE), str(ROOT / "scripts"), before]))
    variables = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if nvcc := program("nvcc"):
        variables |= {"CUDACXX": nvcc, "PATH": os.pathsep.join([os.environ.get("PATH", ""), str(Path(nvcc).parent)])}
    if folder := driver_folder(BUILD / "driver"):
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]))
    return variables


def driver_folder(folder: Path) -> Path | None:
    """Make a folder with a libcuda.so where the driver has only libcuda.so.1. Horovod loads it by the first name alone."""
    if _loads("libcuda.so") or not _loads("libcuda.so.1"):
        return None
    mapped = Path("/proc/self/maps").read_text()
    found = re.search(r"/\S*/libcuda\.so\.\d\S*$", mapped, re.MULTILINE)
    if found is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libcuda.so"
    link.unlink(missing_ok=True)
    link.symlink_to(found[0])
    return folder


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
