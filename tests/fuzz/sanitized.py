"""Builds the binding and the CPU kernels with AddressSanitizer and UBSan, for the fuzzer, and prints the module's path."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all"


def module() -> Path:
    """Build the module where it is not up to date. All that the package's own build says of it holds, but for the flags."""
    sys.path.insert(0, str(ROOT / "tests" / "simt"))
    import build

    options = ["-DGRADCOMP_CUDA=OFF", "-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={FLAGS}"]
    folder = build.cmake(ROOT, "native-asan", build.compiler(), options)
    return folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


if __name__ == "__main__":
    print(module())
