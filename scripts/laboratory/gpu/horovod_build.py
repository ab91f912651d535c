"""Horovod built offline from its sdist for one GPU. Without NCCL it stages CUDA tensors through gloo."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from laboratory.gpu.gpu import Gpu
from laboratory.gpu.place import PREPARED
from laboratory.gpu.stages import Clock, Impossible
from laboratory.machine import ROOT
from setting_up import horovod_patches

# The version that scripts/setup builds, too.
(VERSION,) = re.findall(r"^HOROVOD=(.+)$", (ROOT / "scripts" / "setup").read_text(), re.MULTILINE)


def unpack(prepared: Path, folder: Path) -> Path:
    """Unpack and patch the sources. Return their folder."""
    sdists = sorted(prepared.glob(f"horovod-{VERSION}*.tar.gz"))
    if not sdists:
        raise Impossible("Horovod is not installed here; run `scripts/gpu_check --prepare` where there is a package registry")
    with tarfile.open(sdists[0]) as archive:
        if hasattr(tarfile, "data_filter"):  # as of Python 3.11.4
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    tree = folder / f"horovod-{VERSION}"
    try:
        horovod_patches.apply(tree)
    except horovod_patches.PassageMissing as fault:
        raise Impossible(
            f"the patches do not fit {sdists[0].name}: {fault};"
            " repeat --prepare, or change scripts/setting_up/horovod_patches.py"
        ) from fault
    return tree


def variables(gpu: Gpu | None) -> dict[str, str]:
    """Return the variables of a build for one GPU, or for none."""
    wanted = {f"HOROVOD_WITHOUT_{name}": "1" for name in ("TENSORFLOW", "MXNET", "MPI")}
    wanted |= {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_GLOO": "1", "CMAKE_POLICY_VERSION_MINIMUM": "3.5"}
    cores = str(len(os.sched_getaffinity(0)))
    wanted |= {"MAKEFLAGS": f"-j{cores}", "CMAKE_BUILD_PARALLEL_LEVEL": cores}
    if gpu:
        wanted |= {"HOROVOD_BUILD_CUDA_CC_LIST": gpu.arch, "CUDAARCHS": gpu.arch}
    if shutil.which("ninja"):
        wanted["CMAKE_GENERATOR"] = "Ninja"
    return wanted


def nccl_variables(folder: Path) -> dict[str, str]:
    """Return the variables of a build with NCCL: the package that came with torch, or the system's library."""
    found = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    if found is None or not found.submodule_search_locations:
        if not Path("/usr/include/nccl.h").exists():
            raise Impossible("NCCL is missing; install nvidia-nccl-cu13, or the system's NCCL (/usr/include/nccl.h)")
        return {"HOROVOD_GPU_OPERATIONS": "NCCL"}
    package = Path(next(iter(found.submodule_search_locations)))
    folder.mkdir(parents=True, exist_ok=True)
    linked = folder / "libnccl.so"  # the package has only the versioned name, which no linker looks for
    linked.unlink(missing_ok=True)
    linked.symlink_to(package / "lib" / "libnccl.so.2")
    places = {"HOROVOD_NCCL_INCLUDE": str(package / "include"), "HOROVOD_NCCL_LIB": str(folder)}
    return {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED", **places}


def build(clock: Clock, gpu: Gpu | None, target: Path, more: Mapping[str, str] | None = None) -> None:
    """Build and install Horovod into the target folder."""
    work = target.with_name(f"{target.name}-source")
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    tree = unpack(PREPARED, work)
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-v", "--no-index", "--no-deps"]
    wanted = {**variables(gpu), **(more or {})}
    clock.command([*install, "--no-build-isolation", "--no-cache-dir", "--target", target, tree], cwd=None, **wanted)
