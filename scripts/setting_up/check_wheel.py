"""Checks a wheel against its own list of digests: whoever keeps one for years should not install half of it.

    python check_wheel.py WHEEL

Ends with the status 1 and a sentence if a file is damaged, missing or not listed.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import sys
import zipfile
import zlib
from pathlib import Path


def fault(path: Path) -> str:
    """Return what is wrong with a wheel, or an empty text."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name for name in archive.namelist() if not name.endswith("/")}
            lists = [name for name in names if name.endswith(".dist-info/RECORD")]
            if len(lists) != 1:
                return f"it has {len(lists)} lists of digests"
            rows = [row for row in csv.reader(io.StringIO(archive.read(lists[0]).decode())) if row]
            if any(len(row) != 3 for row in rows):
                return f"{lists[0]} is no list of names, digests and sizes"
            digests = {name: (digest, size) for name, digest, size in rows}
            if different := names ^ digests.keys():
                return f"{min(different)} is {'not listed' if min(different) in names else 'missing'}"
            for name in sorted(names - {lists[0]}):
                digest, size = digests[name]
                if str(archive.getinfo(name).file_size) != size or digest != sha256(archive, name):
                    return f"{name} is damaged"
    except (OSError, EOFError, ValueError, RuntimeError, csv.Error, zipfile.BadZipFile, zlib.error) as error:
        return f"it cannot be read ({error})"
    return ""


def sha256(archive: zipfile.ZipFile, name: str) -> str:
    """Return the digest of a file as a list has it."""
    with archive.open(name) as file:
        found = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else hashlib.sha256(file.read())
    return "sha256=" + base64.urlsafe_b64encode(found.digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    if reason := fault(Path(sys.argv[1])):
        print(f"{sys.argv[1]}: {reason}", file=sys.stderr)
        sys.exit(1)
