"""What a result file says about where it came from: the machine by its model, versions, commit, command, date. No paths."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    for field in ("model name", "Hardware", "CPU part"):
        if found := re.search(rf"^{field}\s*:\s*(.+)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.machine()


def slug(name: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def describe() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
    }


def memory_available() -> float:
    """Bytes that programs can still have, with what the system would give back."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return 1024 * float(found[1]) if found else float("inf")


def describe_gpu() -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mb": round(properties.L2_cache_size / 1e6, 1),
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(packages: Sequence[str] = ("torch", "numpy", "horovod")) -> dict[str, str | None]:
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def commit() -> str | None:
    """The commit that is checked out, marked where tracked files differ from it; None outside a repository."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def origin(command: str) -> dict[str, Any]:
    """What every result file begins with."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "command": command,
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": describe(),
        "versions": versions(),
    }
