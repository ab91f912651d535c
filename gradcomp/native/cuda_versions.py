"""CUDA's versions, of the extension's runtime, the driver and torch, and a warning where they do not fit together."""

from __future__ import annotations

import ctypes


def driver_version(library: str = "libcuda.so.1") -> int:
    """Ask the driver for the newest CUDA that it serves: 13000 is 13.0, and 0 means that there is no driver.

    This begins nothing in the driver: a process that has begun to use it cannot fork workers that use it, too.
    """
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def misfit(runtime: int, driver: int, torchs: str | None) -> str:
    """Name the versions that do not fit, and the remedy; return "" where all fit.

    runtime: that of the extension, 0 without CUDA kernels. driver: 0 without a driver. torchs: torch.version.cuda.

    A driver serves runtimes of its own major version that are newer than itself, from compiled machine code.
    """
    if runtime == 0 or driver == 0:
        return ""
    own = f"gradcomp's kernels were built with CUDA {in_words(runtime)}"
    if runtime // 1000 > driver // 1000:
        return (
            f"{own}, but the driver serves CUDA {in_words(driver)} at most, and no kernel will run: update the driver, or "
            f"build gradcomp with an nvcc of CUDA {driver // 1000} (CUDACXX names it)"
        )
    if torchs and int(torchs.partition(".")[0]) != runtime // 1000:
        return (
            f"{own}, but torch with CUDA {torchs}: build gradcomp with an nvcc of CUDA {torchs.partition('.')[0]} (CUDACXX "
            f"names it), or install a torch for CUDA {runtime // 1000}"
        )
    return ""


def in_words(version: int) -> str:
    """Write 13000 as 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"
