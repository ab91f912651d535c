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
            digests = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(lists[0]).decode())) if row}
            if different := names ^ digests.keys():
                return f"{min(different)} is {'not listed' if min(different) in names else 'missing'}"
            for name in sorted(names - {lists[0]}):
                kind, _, wanted = digests[name].partition("=")
                found = base64.urlsafe_b64encode(hashlib.new(kind, archive.read(name)).digest()).rstrip(b"=").decode()
                if found != wanted:
                    return f"{name} is damaged"
    except (OSError, EOFError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        return f"it cannot be read ({error})"
    return ""


if __name__ == "__main__":
    if reason := fault(Path(sys.argv[1])):
        print(f"{sys.argv[1]}: {reason}", file=sys.stderr)
        sys.exit(1)
