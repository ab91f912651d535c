"""The CUDA kernels as nvcc compiles them, each file once for all that read it. It needs no GPU."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from laboratory import machine
from laboratory.refusal import Refused

SOURCES = machine.ROOT / "csrc" / "cuda"
# As in CMakeLists.txt, where they matter.
FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-DGRADCOMP_CUDA", "-fmad=false", "-cubin", "-Xptxas", "-v")


class Compiled(NamedTuple):
    """A compiled file. report: what nvcc said about its kernels. cubin: their machine code, as a file's content."""

    file: str
    report: str
    cubin: bytes


def nvcc() -> str:
    """Find nvcc."""
    found = shutil.which("nvcc")
    if found is None:
        raise Refused("nvcc was not found; install the CUDA toolkit, or put nvcc on PATH")
    return found


def version() -> str:
    """Return nvcc's version."""
    text = subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    return text.strip().splitlines()[-1]


@functools.cache
def compiled(source: Path, arch: str) -> Compiled:
    """Compile a file for an architecture, for example sm_90."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernels.cubin"
        words = [nvcc(), *FLAGS, "-o", str(binary), f"-arch={arch}", str(source)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            raise Refused(f"nvcc could not compile {source.name}:\n{done.stderr[-2000:]}")
        return Compiled(source.name, done.stderr + done.stdout, binary.read_bytes())


def every(arch: str, names: Sequence[str] | None = None) -> list[Compiled]:
    """Compile the files, all unless named."""
    sources = [path for path in sorted(SOURCES.glob("*.cu")) if names is None or path.name in names]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda source: compiled(source, arch), sources))
