"""What took long is kept in a file of its own, named by all that decides it, so that an interrupted program can continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def path(folder: Path, name: str, key: Mapping[str, Any]) -> Path:
    told_apart = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"{name}-{told_apart}.json"


def load(path: Path) -> dict[str, Any] | None:
    """What is kept there; None if it has not been made yet."""
    try:
        kept = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise ValueError(f"{path.name} in {path.parent.name} is no JSON; delete it, and it is made again") from None
    return dict(kept)
