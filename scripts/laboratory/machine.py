"""The origin that a result file records: command, date, commit, machine by model, versions. It names no path."""

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
    """Return the CPU's model."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    for field in ("model name", "Hardware", "CPU part"):
        if found := re.search(rf"^{field}\s*:\s*(.+)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.machine()


def slug(name: str) -> str:
    """Turn a name into a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def describe() -> dict[str, Any]:
    """Describe the CPU and its memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
    }


def describe_gpu() -> dict[str, Any]:
    """Describe the first GPU."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mb": round(properties.L2_cache_size / 1e6, 1),
    }


def version(package: str) -> str | None:
    """Return an installed package's version."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(packages: Sequence[str] = ("torch", "numpy", "horovod")) -> dict[str, str | None]:
    """Return the versions of Python and these packages."""
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def commit() -> str | None:
    """Return the checked-out commit, marked -dirty where tracked files differ; None outside a repository."""

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
    """Return the first lines of a result file."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "command": command,
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": describe(),
        "versions": versions(),
    }
