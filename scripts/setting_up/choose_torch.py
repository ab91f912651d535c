"""Chooses torch for a machine without a GPU: a CPU build from PyTorch's index if that has one, else pip's own, with its size.

    python choose_torch.py VERSION INDEX

Prints one line: the megabytes to fetch (0: unknown) and pip's arguments. What it decided, and why, goes to standard error.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Seconds for an answer of the index. A machine that cannot reach it must not wait.
PATIENCE = 5


def wheels(arguments: Sequence[str]) -> list[str]:
    """Return the addresses of the wheels that pip would fetch for these arguments; none if it cannot tell."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # fast-deps reads a wheel's metadata by range requests: otherwise some indexes make pip fetch the wheels for it.
        dry = ["install", "--dry-run", "--use-feature=fast-deps", "--report", str(report), *arguments]
        done = subprocess.run([sys.executable, "-m", "pip", *dry], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if done.returncode != 0:
            return []
        return [item["download_info"]["url"] for item in json.loads(report.read_text())["install"]]


def length(url: str, method: str = "HEAD") -> int:
    """Return the bytes that a server has at an address; 0 if it does not say."""
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=PATIENCE, context=context) as answer:
        return int(answer.headers.get("Content-Length") or 0)


def bytes_of_wheel(url: str) -> int:
    """Return the bytes of a wheel; 0 if its server does not answer."""
    parts = urlsplit(url)
    try:
        return Path(unquote(parts.path)).stat().st_size if parts.scheme == "file" else length(url)
    except (OSError, ValueError):
        return 0


def on_index(version: str, index: str) -> str:
    """Return the reason why pip cannot install the CPU build from the index; an empty text if it can."""
    try:
        length(f"{index.rstrip('/')}/torch/", "GET")
    except (OSError, ValueError) as fault:
        return f"it does not answer: {getattr(fault, 'reason', fault)}"
    if wheels(["--no-deps", "--ignore-installed", f"torch=={version}+cpu", "--extra-index-url", index]):
        return ""
    return f"it has no torch {version} for Python {sys.version_info[0]}.{sys.version_info[1]} here"


def main(arguments: list[str]) -> int:
    """Choose, and say so."""
    version, index = arguments
    reason = on_index(version, index)
    chosen = [f"torch=={version}", "numpy"] if reason else [f"torch=={version}+cpu", "numpy", "--extra-index-url", index]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        size = round(sum(pool.map(bytes_of_wheel, wheels(chosen))) / 1e6)
    if not reason:
        print(f"setup: this machine has no GPU, so that torch is the CPU build of {index}", file=sys.stderr)
    else:
        whole = f"{size:,} MB with all it needs" if size else "of unknown size; with CUDA packages it is some 3,000 MB"
        print(
            f"setup: no CPU build of torch from {index}: {reason}. pip's own torch is {whole};"
            ' GRADCOMP_TORCH="torch==... --index-url ..." names another',
            file=sys.stderr,
        )
    print(size, *chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
