"""scripts/check_machines: runs the cells one after another, from nothing to the end of scripts/demo, and keeps a record."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from laboratory import machine
from laboratory.machines.cells import CELLS, Cell
from laboratory.machines.root import Failed, Root, remove, toolkit
from laboratory.refusal import Refused
from laboratory.report import results
from laboratory.report.progress import Progress

PROGRAMS = ("debootstrap", "unshare", "chroot", "git", "tar", "du")
UNITS = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}


def main(arguments: Sequence[str]) -> int:
    """Run the chosen cells. Return 0, 1 if one failed, 2 if they cannot be run."""
    parser = argparse.ArgumentParser(prog="scripts/check_machines", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the cells, and do nothing else")
    parser.add_argument("--cell", action="append", metavar="NAME", help="run this cell only; may be given several times")
    parser.add_argument("--check", action="store_true", help="run scripts/check --fast after the demo, too")
    parser.add_argument("--keep", action="store_true", help="keep the roots and the downloads afterwards")
    parser.add_argument(
        "--roots",
        metavar="FOLDER",
        help="make the roots in FOLDER/gradcomp-machines; 12 GB must be free (default: a new folder in TMPDIR)",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", default=machine.ROOT / "benchmarks" / "results", help="where machines.json goes"
    )
    chosen = parser.parse_args(arguments)
    if chosen.list:
        for cell in CELLS:
            print(f"{cell.name:26} {cell.distribution}, {cell.compiler or 'its own g++'}, {cell.user}{', nvcc' * cell.nvcc}")
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    # Results name no path.
    cells = [word for name in chosen.cell or () for word in ("--cell", name)]
    command = shlex.join(["scripts/check_machines", *cells, *["--check"] * chosen.check])
    try:
        return run(select(chosen.cell), chosen, command)
    except Refused as refusal:
        print(f"check_machines: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ncheck_machines: interrupted; finished cells are in the record", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def select(names: Sequence[str] | None) -> list[Cell]:
    """Return the named cells, or all."""
    known = {cell.name: cell for cell in CELLS}
    for name in names or ():
        if name not in known:
            raise Refused(f"unknown cell {name!r}; known: {', '.join(known)}")
    return [known[name] for name in names] if names else list(CELLS)


def run(cells: Sequence[Cell], chosen: argparse.Namespace, command: str) -> int:
    """Run the cells, and write the record after each."""
    if os.geteuid() != 0:
        raise Refused("roots are made and entered as root: run it with sudo, or as root")
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise Refused(f"these programs are missing: {', '.join(missing)}; apt-get install debootstrap util-linux git")
    nvcc = toolkit() if any(cell.nvcc for cell in cells) else None
    record = Path(chosen.out) / "machines.json"
    failed = []
    with folder_of_roots(chosen) as folder:
        for cell in cells:
            found = run_cell(cell, folder, nvcc if cell.nvcc else None, chosen)
            keep(record, command, found)
            print(f"{cell.name}: {found['result']}, {found['minutes']} minutes; written: {record}", flush=True)
            if found["result"] != "passed":
                failed.append(cell.name)
    if failed:
        print(f"check_machines: {len(failed)} of {len(cells)} cells failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


@contextlib.contextmanager
def folder_of_roots(chosen: argparse.Namespace) -> Iterator[Path]:
    """Make the folder for roots, bases and downloads. Remove what was made at the end, and nothing else in a user's folder."""
    folder = Path(chosen.roots) / "gradcomp-machines" if chosen.roots else Path(tempfile.mkdtemp(prefix="gradcomp-machines."))
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        if not chosen.keep:
            for made in [*folder.glob("base-*"), *(folder / cell.name for cell in CELLS), folder / "pip-cache"]:
                remove(made)
            if not any(folder.iterdir()):
                folder.rmdir()


def run_cell(cell: Cell, folder: Path, nvcc: Path | None, chosen: argparse.Namespace) -> dict[str, Any]:
    """Run one cell, and return its part of the record."""
    progress, began = Progress(every=30), time.monotonic()
    root = Root(folder, cell.name, lambda text: progress(f"{cell.name}: {text}"))
    found: dict[str, Any] = {
        "cell": cell.name,
        "distribution": cell.distribution,
        "user": "root" if cell.user == "root" else "user",
        "nvcc": cell.nvcc,
        "date": machine.origin("")["date"],
        "commit": machine.commit(),
    }
    try:
        root.make(cell.suite)
        found |= try_demo(cell, root, nvcc, chosen)
        found["result"] = "passed"
    except Failed as failure:
        found["result"] = f"failed: {failure}"
        print(f"{cell.name}: {failure}; the whole log is {root.log}", file=sys.stderr)
    finally:
        progress.end()
        if not chosen.keep:
            remove(root.path)
    found["minutes"] = round((time.monotonic() - began) / 60, 1)
    if found["result"] == "passed" and not chosen.keep:
        root.log.unlink()
    return found


def try_demo(cell: Cell, root: Root, nvcc: Path | None, chosen: argparse.Namespace) -> dict[str, Any]:
    """Do what a newcomer does: call set-up, install what it asks for, run the demo."""
    checkout = root.add_checkout(cell.user)
    apt = {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "--yes", "--no-install-recommends"]
    fetched = 0.0
    root.enter(["apt-get", "update"], "root", "apt-get update", variables=apt)
    if cell.packages:
        fetched += _megabytes_of_apt(
            root.enter([*install, *cell.packages], "root", "installing the compiler", variables=apt)[1]
        )
    compiler = {"CXX": cell.compiler} if cell.compiler else {}

    def script(name: str, what: str, fine: bool = True) -> tuple[int, str]:
        return root.enter(["bash", "-c", f"cd {checkout} && scripts/{name}"], cell.user, what, nvcc, fine, compiler)

    status, said = script("setup", "set-up on a bare machine", fine=False)
    asked = re.search(r"apt-get install ([a-z0-9+. -]+)$", said, re.MULTILINE)
    if status == 0 or asked is None or (root.path / str(checkout).lstrip("/") / ".venv").exists():
        raise Failed(f"set-up on a bare machine should name what is missing before it does anything; it said: {said[-300:]}")
    fetched += _megabytes_of_apt(
        root.enter([*install, *asked[1].split()], "root", "installing what set-up asked for", variables=apt)[1]
    )
    before, began = root.megabytes(), time.monotonic()
    said = script("demo", "scripts/demo")[1]
    minutes, disk = (time.monotonic() - began) / 60, root.megabytes() - before
    ready = re.search(r"^ready: torch (\S+), .*CUDA kernels (yes|no)", said, re.MULTILINE)
    if ready is None or (ready[2] == "yes") != cell.nvcc:
        raise Failed(f"CUDA kernels should be {'built' if cell.nvcc else 'left out'}: {ready and ready[0]}")
    began = time.monotonic()
    again = script("setup", "set-up again")[1]
    seconds = time.monotonic() - began
    if len(again.splitlines()) != 1:
        raise Failed(f"a set-up that is done should say one line, not: {again}")
    if chosen.check:
        script("check --fast", "scripts/check --fast")
    used = cell.compiler or "c++"
    told = root.enter(["bash", "-c", f"python3 -V; {used} --version | head -n 1"], cell.user, "versions")[1].splitlines()
    logs = root.path / str(checkout / "build" / "logs").lstrip("/")
    return {
        "python": told[0].split()[-1],
        "compiler": told[1],
        "torch": ready[1],
        "asked_for": asked[1],
        "apt_megabytes": round(fetched),
        "pip_megabytes": round(sum(_megabytes_of_pip(log.read_text(errors="replace")) for log in logs.glob("*.log"))),
        "disk_megabytes": disk,
        "demo_minutes": round(minutes, 1),
        "seconds_when_done": round(seconds, 1),
        "checked": bool(chosen.check),
    }


def _megabytes_of_apt(said: str) -> float:
    told = re.search(r"^Need to get ([0-9,.]+) ([kMG]B)", said, re.MULTILINE)
    return float(told[1].replace(",", "")) * UNITS[told[2]] if told else 0.0


def _megabytes_of_pip(log: str) -> float:
    """Sum what pip fetched, from the network or from the cache that the cells share."""
    sizes = re.findall(r"^ *(?:Downloading|Using cached) \S+ \(([0-9.]+) ([kMG]B)\)", log, re.MULTILINE)
    return sum(float(size) * UNITS[unit] for size, unit in sizes)


def keep(record: Path, command: str, found: dict[str, Any]) -> None:
    """Put a cell into the record, in the matrix's order, in place of its earlier run."""
    earlier = results.read(record) or {}
    cells = {cell["cell"]: cell for cell in earlier.get("cells", [])} | {found["cell"]: found}
    shared = "pip's downloads are shared between cells; pip_megabytes counts them in every cell"
    ordered = [cells[cell.name] for cell in CELLS if cell.name in cells]
    results.write(record, {"what": "machines", **machine.origin(command), "downloads": shared, "cells": ordered})
