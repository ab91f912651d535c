"""Makes small faults, one at a time, in a copy of the checkout, and records which test finds each.

    scripts/check --mutations [--only TEXT] [--out FILE]

The copy is the last commit; it lies in build/mutations.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from mutations.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build" / "mutations"
SOURCES = ("*.py", "*.h", "*.inc", "*.cpp", "*.cu", "*.cuh")
# Seconds a set of tests may take: what hangs is found, too.
PATIENCE = 1800


def place_of(fault: Fault, root: Path) -> Path:
    """Find the file that a fault is made in: the one whose text has the right passage, once."""
    files = sorted({path for pattern in SOURCES for path in (root / fault.folder).rglob(pattern)})
    found = [path for path in files if fault.right in path.read_text()]
    if len(found) != 1 or found[0].read_text().count(fault.right) != 1:
        raise LookupError(f"{fault.name!r}: its passage stands in {len(found)} places of {fault.folder}, not in one")
    return found[0]


def make_copy() -> None:
    """Clone the last commit and build it for CPUs; CUDA kernels are built for the emulator by the tests that need them."""
    shutil.rmtree(COPY, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--local", str(ROOT), str(COPY)], check=True)


def build() -> None:
    """Build the copy's extension."""
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=COPY,
        env={**os.environ, "GRADCOMP_CUDA": "OFF"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the copy could not be built:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def first_failure(tests: list[str]) -> str | None:
    """Run tests until one fails; name it. None where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(COPY)}
    try:
        done = subprocess.run(command, cwd=COPY, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"a test that does not end in {PATIENCE} s"
    if done.returncode == 0:
        return None
    named = re.search(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)", done.stdout, re.MULTILINE)
    return named.group(1) if named else f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}"


def try_out(fault: Fault, others: bool) -> str | None:
    """Make one fault, run the tests that are to find it, or all others, and mend it. Return the test that failed."""
    path = place_of(fault, COPY)
    right = path.read_text()
    own = [str(each) for name in fault.tests for each in sorted((COPY / "tests").rglob(name))]
    path.write_text(right.replace(fault.right, fault.wrong))
    try:
        build()
        return first_failure(["tests", *(f"--ignore={each}" for each in own)] if others else own)
    finally:
        path.write_text(right)


def record_of(results: dict[str, dict[str, object]], commit: str) -> dict[str, object]:
    """Describe a run: what was tried where, and what became of it."""
    return {
        "command": " ".join(["scripts/check --mutations", *sys.argv[1:]]),
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.date.today().isoformat(),
        "faults": len(results),
        "not_found": sum(each["found_by"] is None for each in results.values()),
        "results": list(results.values()),
    }


def main() -> None:
    """Try all faults, or those whose name has a text in it, and write down what became of them."""
    parser = argparse.ArgumentParser(description="Make small faults and record which test finds each.")
    parser.add_argument("--only", default="", help="a text that the names of the faults to try contain")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "mutations.json")
    options = parser.parse_args()
    make_copy()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=COPY, capture_output=True, text=True, check=True).stdout.strip()
    results: dict[str, dict[str, object]] = {}
    for others in (False, True):
        chosen = [each for each in FAULTS if options.only in each.name and not results.get(each.name, {}).get("found_by")]
        for number, fault in enumerate(chosen, 1):
            began = time.monotonic()
            found_by = try_out(fault, others)
            seconds = round(time.monotonic() - began, 1)
            results[fault.name] = {"fault": fault.name, "found_by": found_by, "by_others": others, "seconds": seconds}
            print(f"{number}/{len(chosen)} {seconds:6.1f} s  {fault.name}: {found_by or 'not found'}", flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(record_of(results, commit), indent=1) + "\n")
    lost = [name for name, each in results.items() if each["found_by"] is None]
    print(f"{len(results) - len(lost)} of {len(results)} faults were found" + "".join(f"\nNOT FOUND: {name}" for name in lost))
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
