"""The GPU as nvidia-smi describes it."""

from __future__ import annotations

import subprocess
from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU: name, driver, compute capability, memory."""

    name: str
    driver: str
    capability: str
    memory: str

    @property
    def arch(self) -> str:
        """Return the architecture as CMake and nvcc number it."""
        return self.capability.replace(".", "")


def find(program: str = "nvidia-smi") -> Gpu | None:
    """Find the first GPU of this machine."""
    fields = "--query-gpu=name,driver_version,compute_cap,memory.total"
    try:
        done = subprocess.run([program, fields, "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return parse(lines[0]) if done.returncode == 0 and lines else None


def parse(line: str) -> Gpu | None:
    """Read a line of nvidia-smi."""
    fields = [part.strip() for part in line.split(",")]
    return Gpu(*fields) if len(fields) == 4 and fields[2].replace(".", "").isdecimal() else None
