"""Makes small faults, one at a time, in copies of the checkout, and records which test finds each.

    scripts/check --mutations [--only TEXT] [--jobs N] [--out FILE]

A copy is the last commit; it lies in build/mutations. Every job has a copy of its own. With --only, the record keeps its other
faults.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutations.fault import Fault, faults
from mutations.fsdp_faults import FSDP_FAULTS
from mutations.kernels_faults import KERNEL_FAULTS
from mutations.local_faults import LOCAL_FAULTS
from mutations.order_faults import ORDER_FAULTS, REASONS
from mutations.package_faults import PACKAGE_FAULTS
from mutations.program_faults import PROGRAM_FAULTS
from mutations.progress_faults import PROGRESS_FAULTS
from mutations.updates_faults import UPDATES_FAULTS

from laboratory import machine
from laboratory.report import write

ROOT = Path(__file__).resolve().parents[2]
FAULTS = (
    *ORDER_FAULTS,
    *faults(KERNEL_FAULTS, PROGRESS_FAULTS, UPDATES_FAULTS, PACKAGE_FAULTS, PROGRAM_FAULTS),
    *FSDP_FAULTS,
    *LOCAL_FAULTS,
)
COPIES = ROOT / "build" / "mutations"
SOURCES = ("*.py", "*.h", "*.inc", "*.cpp", "*.cu", "*.cuh")
# Seconds that a set of tests may take. A fault that hangs a test is found, too.
PATIENCE = 1800


def place_of(fault: Fault, root: Path) -> Path:
    """Find the file that a fault is made in: the only one with the right passage, which stands there once."""
    files = sorted({path for pattern in SOURCES for path in (root / fault.folder).rglob(pattern)})
    found = [path for path in files if fault.right in path.read_text()]
    if len(found) != 1 or found[0].read_text().count(fault.right) != 1:
        raise LookupError(f"{fault.name!r}: its passage stands in {len(found)} files of {fault.folder}, or twice in one")
    return found[0]


def make_copy(number: int) -> Path:
    """Clone the last commit."""
    copy = COPIES / str(number)
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--local", str(ROOT), str(copy)], check=True)
    return copy


def build(copy: Path) -> None:
    """Build a copy's extension for CPUs, and the emulator. A fault that no compiler takes is none."""
    environment = {**os.environ, "GRADCOMP_CUDA": "OFF"}
    for command in (["setup.py", "build_ext", "--inplace"], ["tests/simt/build.py"]):
        done = subprocess.run([sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"the copy {copy} could not be built:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def first_failure(copy: Path, tests: list[str]) -> str | None:
    """Run tests until one fails, and name it, or the signal that ended them. Return None where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "--tb=no", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"a test that does not end in {PATIENCE} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"the tests' process, which {signal.Signals(-done.returncode).name} ended"
    named = re.search(r"^FAILED (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode != 1 or named is None:
        raise RuntimeError(f"no test failed, but pytest ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return named.group(1)


def files_of(fault: Fault, copy: Path) -> list[str]:
    """List the test files that are to find a fault."""
    return [str(each) for name in fault.tests for each in sorted((copy / "tests").rglob(name))]


def check_right_code(results: dict[str, dict[str, Any]], copy: Path) -> None:
    """Refuse the results unless the tests that found faults pass without them."""
    build(copy)
    tests = sorted({test for each in results.values() if (test := each["found_by"]) is not None and "::" in test})
    if tests and (failed := first_failure(copy, tests)) is not None:
        raise RuntimeError(f"{failed} fails without any fault")
    print("without a fault, the tests that found faults pass")


def try_out(fault: Fault, copy: Path, others: bool) -> str | None:
    """Make one fault, run the tests that are to find it, or all others, and mend it. Return the test that failed."""
    path = place_of(fault, copy)
    right = path.read_text()
    tests = files_of(fault, copy)
    if others:
        tests = ["tests", *(f"--ignore={each}" for each in tests)]
    if fault.folder == "csrc/cuda":
        tests += ["-k", "simt"]  # no other device runs them
    path.write_text(right.replace(fault.right, fault.wrong))
    try:
        build(copy)
        found_by = first_failure(copy, tests)
    finally:
        path.write_text(right)
    return found_by


def record_of(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Describe a run as the laboratory's results do; and of every fault its commit and the test that found it."""
    return {
        "what": "mutations",
        **machine.origin("scripts/check --mutations"),
        "faults": len(results),
        "not_found": sum(each["found_by"] is None for each in results.values()),
        "results": [results[fault.name] for fault in FAULTS if fault.name in results],
    }


def main() -> None:
    """Try faults on their own tests, then on all others those that passed, and write the record after each."""
    parser = argparse.ArgumentParser(prog="scripts/check --mutations", description="Make small faults that tests must find.")
    parser.add_argument("--only", default="", help="try the faults whose names contain this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults tried at a time (default: one a core)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "mutations.json")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if options.only in fault.name]
    if not chosen or options.jobs < 1:
        parser.error(
            f"no fault's name contains {options.only!r}" if not chosen else f"--jobs {options.jobs} must be at least 1"
        )
    copies: queue.Queue[Path] = queue.Queue()
    for number in range(options.jobs):
        copies.put(make_copy(number))
    commit, results = str(machine.commit()).removesuffix("-dirty"), {}
    if options.only and options.out.exists():
        results = {each["fault"]: each for each in json.loads(options.out.read_text())["results"]}
    tried, lock = 0, threading.Lock()

    def attempt(fault: Fault, others: bool) -> None:
        nonlocal tried
        copy, began = copies.get(), time.monotonic()
        try:
            found_by = try_out(fault, copy, others)
        finally:
            copies.put(copy)
        with lock:
            tried += 1
            results[fault.name] = {"fault": fault.name, "commit": commit, "found_by": found_by, "by_others": others}
            if found_by is None and fault.name in REASONS:
                results[fault.name]["reason"] = REASONS[fault.name]
            print(f"{tried} tried, {time.monotonic() - began:6.1f} s  {fault.name}: {found_by or 'not found'}", flush=True)
            write(options.out, record_of(results))

    for others in (False, True):
        pool = ThreadPoolExecutor(options.jobs)
        try:
            for attempted in [pool.submit(attempt, fault, others) for fault in chosen]:
                attempted.result()
        finally:  # an interrupt, or a fault that cannot be made, ends the run
            pool.shutdown(cancel_futures=True)
        chosen = [fault for fault in chosen if results[fault.name]["found_by"] is None]
    check_right_code(results, COPIES / "0")
    lost = [name for name, each in results.items() if each["found_by"] is None and "reason" not in each]
    print(f"{len(results) - len(lost)} of {len(results)} faults were found" + "".join(f"\nNOT FOUND: {name}" for name in lost))
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
