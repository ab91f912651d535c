"""The GPU as nvidia-smi describes it."""

from __future__ import annotations

import subprocess
from typing import NamedTuple


class Gpu(NamedTuple):
    name: str
    driver: str
    capability: str
    memory: str

    @property
    def arch(self) -> str:
        """The architecture as CMake and nvcc number it."""
        return self.capability.replace(".", "")


def find(program: str = "nvidia-smi") -> Gpu | None:
    """The first GPU of this machine, or None."""
    fields = "--query-gpu=name,driver_version,compute_cap,memory.total"
    try:
        done = subprocess.run([program, fields, "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return parse(lines[0]) if done.returncode == 0 and lines else None


def parse(line: str) -> Gpu | None:
    fields = [part.strip() for part in line.split(",")]
    return Gpu(*fields) if len(fields) == 4 and fields[2].replace(".", "").isdecimal() else None
