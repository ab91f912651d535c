"""Read every CUDA kernel's machine code: loads in flight, local memory and divisions in loops. It needs nvcc, and no GPU."""

from __future__ import annotations

import argparse

from laboratory import options
from laboratory.kernels import compiled, machine_code
from laboratory.report import results

EXAMPLES = """\
example:
  scripts/lab machine-code --arch sm_90      # a minute

Columns: 128-bit loads, and bytes, that a thread has in flight before it uses the first; loads from local memory and divisions
of integers inside loops; instructions of the loop that loads most, and the bytes that it loads in a turn."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--arch", type=options.arch, default="sm_90", help="architecture to compile for (default: sm_90)")
    options.add_places(parser, "the architecture")


def run(chosen: argparse.Namespace) -> int:
    """Compile the kernels, read them, and write the table."""
    codes = machine_code.measure(chosen.arch)
    print(f"{machine_code.table(codes)}\n\n{len(codes)} kernels, {chosen.arch}")
    settings = {"arch": chosen.arch, "nvcc": compiled.version()}
    results.save(chosen, results.path_of(chosen, chosen.arch), {"settings": settings, "lines": machine_code.lines(codes)})
    return 0
