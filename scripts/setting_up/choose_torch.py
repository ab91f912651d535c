"""Chooses torch for a machine without a GPU: a CPU build from PyTorch's index if that answers, else pip's own, with its size.

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
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pip._vendor.packaging.tags import sys_tags
from pip._vendor.packaging.utils import InvalidWheelFilename, parse_wheel_filename
from pip._vendor.packaging.version import InvalidVersion

# Seconds for the index's page. A machine that cannot reach the index must not wait.
PATIENCE = 5


class Links(HTMLParser):
    """The targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.targets += [value for name, value in attrs if tag == "a" and name == "href" and value]


def opened(url: str, method: str = "GET") -> tuple[str, int]:
    """Return a page and its length in bytes, under pip's certificates if the environment names some."""
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=PATIENCE, context=context) as answer:
        return answer.read().decode(errors="replace"), int(answer.headers.get("Content-Length") or 0)


def build_for_this_python(page: str, version: str) -> str | None:
    """Return the full version (2.13.0+cpu) of a wheel on an index's page that this Python can install."""
    links = Links()
    links.feed(page)
    usable = frozenset(sys_tags())
    for target in links.targets:
        try:
            _, found, _, tags = parse_wheel_filename(unquote(urlsplit(target).path.rpartition("/")[2]))
        except (InvalidWheelFilename, InvalidVersion):
            continue
        if found.public == version and tags & usable:
            return str(found)
    return None


def on_index(version: str, index: str) -> tuple[str | None, str]:
    """Return the index's version for this Python, or None and the reason."""
    try:
        page, _ = opened(f"{index.rstrip('/')}/torch/")
    except (OSError, ValueError) as fault:
        return None, f"it does not answer: {getattr(fault, 'reason', fault)}"
    found = build_for_this_python(page, version)
    return found, f"it has no torch {version} for Python {sys.version_info[0]}.{sys.version_info[1]} here"


def length(url: str) -> int:
    """Return the bytes of a file that pip would fetch; 0 if its server does not say."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(unquote(parts.path)).stat().st_size
    try:
        return opened(url, "HEAD")[1]
    except (OSError, ValueError):
        return 0


def megabytes(arguments: list[str]) -> int:
    """Return the megabytes that pip would fetch for these arguments; 0 if that cannot be found out without fetching them."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # fast-deps reads a wheel's metadata by range requests: otherwise some indexes make pip fetch the wheels for it.
        dry = ["install", "--dry-run", "--quiet", "--use-feature=fast-deps", "--report", str(report), *arguments]
        done = subprocess.run([sys.executable, "-m", "pip", *dry], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if done.returncode != 0:
            return 0
        urls = [item["download_info"]["url"] for item in json.loads(report.read_text())["install"]]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return round(sum(pool.map(length, urls)) / 1e6)


def main(arguments: list[str]) -> int:
    """Choose, and say so."""
    version, index = arguments
    found, reason = on_index(version, index)
    if found:
        chosen = [f"torch=={found}", "numpy", "--extra-index-url", index]
        print(f"setup: this machine has no GPU, so that torch is the CPU build of {index}", file=sys.stderr)
    else:
        chosen = [f"torch=={version}", "numpy"]
    size = megabytes(chosen)
    if not found:
        said = f"{size:,} MB with all it needs" if size else "of unknown size; with CUDA packages it is some 3,000 MB"
        print(
            f"setup: no CPU build of torch from {index}: {reason}. pip's own torch is {said};"
            ' GRADCOMP_TORCH="torch==... --index-url ..." names another',
            file=sys.stderr,
        )
    print(size, *chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
