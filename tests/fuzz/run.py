"""Fuzzes the CPU kernels through the binding: PYTHONPATH=tests:tests/helpers python -m fuzz.run --help.

Each call follows from the seed, its kernel and its number. A call that ends the process, or hangs, is named as any other.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import importlib.util
import json
import multiprocessing
import os
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

# A round of calls, one of each kernel, that takes longer hangs.
HANG_SECONDS = 600
# Of the calls, these have something wrong.
WRONG = 0.35
STATUS = struct.Struct("qq")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz. Return 0, or 1 after a call that broke its contract."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.run", description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000, help="calls in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", metavar="KERNEL", help="only this kernel")
    parser.add_argument("--call", type=int, help="only the call of this number, with --only: a call that failed, again")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--native", type=Path, help="another build of the extension than gradcomp's own")
    parser.add_argument("--out", type=Path, help="the record, in JSON")
    options = parser.parse_args(arguments)
    own = Path(sys.modules[__name__].__file__ or "").resolve().parents[1]
    # With --native, gradcomp comes from here, and not from an environment that has another.
    sys.path[:0] = [str(own), str(own / "helpers"), str(own.parent / "scripts"), str(own.parent)]
    if options.native:
        load(options.native)
    names = kernels()
    if options.only and options.only not in names:
        parser.error(f"--only={options.only} is no kernel; there are {', '.join(names)}")
    if options.call is not None:
        if not options.only:
            parser.error("--call needs --only: every kernel has a call of this number")
        done = fuzz_one(options.seed, options.only, options.call, shown=True)
        print(f"kept its contract: {done}")
        return 0
    began = time.monotonic()
    failures, counts = fuzz(options, [options.only] if options.only else names)
    for failure in failures:
        print(failure, file=sys.stderr)
    total = sum(each["calls"] for each in counts.values())
    seconds = time.monotonic() - began
    refused, compared = (sum(each[what] for each in counts.values()) for what in ("refused", "compared"))
    done = f"{refused} refused, {compared} compared with definitions"
    print(f"{total} calls of {len(counts)} functions in {seconds:.0f} s: {done}")
    if options.out and not failures:
        keep(options, counts, seconds)
    return 1 if failures else 0


def load(path: Path) -> None:
    """Load this build in place of gradcomp's own."""
    spec = importlib.util.spec_from_file_location("gradcomp._native", path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["gradcomp._native"] = module


def kernels() -> list[str]:
    """Name all that is fuzzed."""
    import fuzz.blocks
    import fuzz.chains
    import fuzz.gradients
    import fuzz.levels
    import fuzz.packed
    import fuzz.progress
    import fuzz.sparse  # noqa: F401
    from fuzz import call

    return [*call.MAKERS, *call.SCRATCHES]


def fuzz_one(seed: int, kernel: str, number: int, shown: bool = False) -> Any:
    """Make and run one call."""
    import numpy as np
    from fuzz import call
    from fuzz.drawn import Draw
    from fuzz.wrong import spoil

    from gradcomp.native import extension

    draw = Draw(f"{seed} {kernel} {number}")
    with np.errstate(all="ignore"):
        if kernel not in call.MAKERS:
            return call.scratch_call(extension.native, kernel, draw)
        wrong, threads = draw.likely(WRONG), draw.choice((1, 1, 2, 3, 0, -1))
        values, check = call.MAKERS[kernel](draw)
        if wrong:
            values, check = spoil(draw, kernel, values), None
        if shown:
            print(f"{kernel}({call.describe(values)}, threads={threads})", flush=True)
        try:
            return call.run(extension.native, kernel, values, check, threads, not wrong)
        except BaseException:
            print(f"{kernel}({call.describe(values)}, threads={threads})", file=sys.stderr)
            raise


def fuzz(options: argparse.Namespace, names: Sequence[str]) -> tuple[list[str], dict[str, dict[str, int]]]:
    """Share the calls out to processes. Return the failures, and the outcomes of each kernel's calls."""
    counts = {name: {"calls": 0, "refused": 0, "compared": 0} for name in names}
    failures, processes = [], multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        workers: list[tuple[BaseProcess, Path]] = []
        for job in range(options.jobs):
            told = Path(folder) / str(job)
            process = processes.Process(target=work, args=(options, names, job, told))
            process.start()
            workers.append((process, told))
        for process, told in workers:
            process.join()
            if process.exitcode == 0:
                for name, own in json.loads(told.read_text()).items():
                    counts[name] = {what: counts[name][what] + count for what, count in own.items()}
            else:
                kernel, number = STATUS.unpack(told.read_bytes()[: STATUS.size])
                again = f"--seed {options.seed} --only {names[kernel]} --call {number}"
                ended = f"ended with status {process.exitcode}" if process.exitcode != 1 else "broke its contract"
                failures.append(f"fuzz: call {number} of {names[kernel]} {ended}; again: python -m fuzz.run {again}")
    return failures, counts


def work(options: argparse.Namespace, names: Sequence[str], job: int, told: Path) -> None:
    """Do one process's share: of each kernel, every so many calls. The call under way stands in the file `told`."""
    counts = {name: collections.Counter(calls=0, refused=0, compared=0) for name in names}
    with told.open("wb", buffering=0) as status:
        for number in range(job, options.calls // len(names), options.jobs):
            for kernel, name in enumerate(names):
                tell(status, kernel, number)
                if kernel == 0:
                    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
                done = fuzz_one(options.seed, name, number)
                counts[name].update(calls=1, refused=int(done.refused), compared=int(done.compared))
    faulthandler.cancel_dump_traceback_later()
    told.write_text(json.dumps(counts))


def tell(status: BinaryIO, kernel: int, number: int) -> None:
    os.pwrite(status.fileno(), STATUS.pack(kernel, number), 0)


def keep(options: argparse.Namespace, counts: dict[str, dict[str, int]], seconds: float) -> None:
    """Write the record."""
    from laboratory import machine
    from laboratory.report import write

    built = "with AddressSanitizer and UBSan" if options.native else "as it is installed"
    command = f"python -m fuzz.run --calls {options.calls} --seed {options.seed} --jobs {options.jobs}"
    figures = {"built": built, "calls": sum(each["calls"] for each in counts.values()), "seconds": round(seconds)}
    write(options.out, {"what": "fuzz", **machine.origin(command), **figures, "functions": counts})


if __name__ == "__main__":
    sys.exit(main())
