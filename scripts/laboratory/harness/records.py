"""Records of finished work, a file each: with their origin, and readers of the kinds that older commits wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laboratory import machine
from laboratory.report import results

# What was measured: its `key` decides the outcome, its `commit` made it; the rest are figures.
Record = dict[str, Any]

# The names of a key in older records, and what those keys held that today's do not.
OLDER_KEYS, OLDER_SETTINGS = ("course", "launch"), ("predicts", "processor")


def write(folder: Path, stem: str, what: str, key: Mapping[str, Any], command: str, figures: Mapping[str, Any]) -> Record:
    """Write a record, and return it. stem: the first part of the file's name."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    record = {"what": what, **machine.origin(command), "key": key, **figures}
    results.write(folder / f"{stem}-{digest}.json", record)
    return record


def find(folder: Path, stem: str, key: Mapping[str, Any]) -> Record | None:
    """Find the record with this key; None if there is none."""
    wanted = json.loads(json.dumps(key))
    found = (read(path) for path in sorted(folder.glob(f"{stem}-*.json")))
    return next((record for record in found if record["key"] == wanted), None)


def read(path: Path) -> Record:
    """Read a record in today's form."""
    record = results.read(path)
    assert record is not None
    for name in OLDER_KEYS:  # accuracy's trainings, and its launches of rounds
        if name in record:
            key = {of: value for of, value in record.pop(name).items() if of not in OLDER_SETTINGS}
            record = {"key": key, **record.pop("run", {}), **record}
    return record


def every(folder: Path) -> list[Record]:
    """Read the records of a folder, by the names of their files."""
    return [read(path) for path in sorted(folder.glob("*.json"))]
