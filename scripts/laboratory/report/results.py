"""Result files: their place, their first lines, and writing them whole."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laboratory import machine
from laboratory.refusal import Refused


def path_of(chosen: argparse.Namespace, name: str | None, ending: str = ".json") -> Path:
    """Name a file in --out after the subcommand and --name, or this name where none was given."""
    stem = "-".join(filter(None, (chosen.subcommand, chosen.name or name)))
    return Path(chosen.out) / f"{stem}{ending}"


def save(chosen: argparse.Namespace, path: Path, content: Mapping[str, Any]) -> None:
    """Write a subcommand's result after the kind, command, commit, machine and versions."""
    write(path, {"what": chosen.subcommand, **machine.origin(chosen.command), **content})
    print(f"written: {path}")


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def read(path: Path) -> dict[str, Any] | None:
    """Read a JSON file; None if it does not exist."""
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except ValueError:
        raise Refused(f"{path.name} in {path.parent.name} is not JSON; delete it, and it is made again") from None
