"""Count registers and memory of every CUDA kernel as nvcc compiles it, against a budget. It needs nvcc, and no GPU.

The budget: 64 registers a thread, so that half of a multiprocessor's threads fit and hide the latency of memory; no local
memory; 48 KiB of shared memory, which every device since Turing gives by default. Each exception below has its reason.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from laboratory import machine, options, report
from laboratory.options import Refused
from laboratory.report import columns

SOURCES = machine.ROOT / "csrc" / "cuda"
# As in CMakeLists.txt, where they matter.
FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-DGRADCOMP_CUDA", "-fmad=false", "-cubin", "-Xptxas", "-v", "-o", "/dev/null")

EXAMPLES = """\
example:
  scripts/lab resources --arch sm_90      # half a minute

The exit status is 1 if a kernel exceeds its budget."""


class Budget(NamedTuple):
    """The most that a kernel may use: registers and bytes of local memory of a thread, bytes of shared memory of a block."""

    registers: int = 64
    stack: int = 0
    spilled: int = 0
    shared: int = 48 * 1024


class Use(NamedTuple):
    """A kernel's use of the same."""

    file: str
    kernel: str
    registers: int
    stack: int
    spilled: int
    shared: int


# Exceptions, by a pattern of the kernel's name.
EXCEPTIONS = {
    r"find(<.*>)?\(": (
        Budget(96, 128, 96),
        "its looks are calls, which hand over the group; all rules but ORQ's index their levels",
    ),
    r"^select_": (Budget(64, 64, 224), "1,024 threads a block, and in one kernel the passes of several"),
    r"^(round|add|settle)_words<., false>": (Budget(80), "ten entries and their addresses; 768 threads have 30 KB in flight"),
}


def budget_of(use: Use) -> Budget:
    """Return a kernel's budget."""
    return next((budget for pattern, (budget, _) in EXCEPTIONS.items() if re.search(pattern, use.kernel)), Budget())


def exceeded(uses: Sequence[Use]) -> list[str]:
    """Return a sentence for each bound that a kernel exceeds."""
    units = ("registers", "bytes of stack", "bytes spilled", "bytes of shared memory")
    return [
        f"{use.file}: {use.kernel} uses {found} {unit}, above the {most} of its budget"
        for use in uses
        for unit, found, most in zip(units, use[2:], budget_of(use), strict=True)
        if found > most
    ]


def measure(arch: str) -> list[Use]:
    """Compile every file for one architecture, for example sm_90."""
    compiler, demangler = _program("nvcc", "install the CUDA toolkit"), _program("c++filt", "apt-get install binutils")

    def uses(source: Path) -> list[Use]:
        words = [compiler, *FLAGS, f"-arch={arch}", str(source)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            raise Refused(f"nvcc could not compile {source.name}:\n{done.stderr[-2000:]}")
        report = done.stderr + done.stdout
        named = subprocess.run([demangler], input=report, capture_output=True, text=True, check=True).stdout
        return parse(source.name, named)

    with ThreadPoolExecutor(2) as pool:
        return [use for found in pool.map(uses, sorted(SOURCES.glob("*.cu"))) for use in found]


def parse(file: str, text: str) -> list[Use]:
    """Read the report of ptxas, kernel by kernel."""
    found = []
    for part in text.split("Compiling entry function ")[1:]:
        name = re.match(r"'(.*?)' for", part)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers.*", part)
        if name is None or stack is None or used is None:
            raise Refused(f"{file}: nvcc's report has an unknown form:\n{part[:500]}")
        short = re.sub(r"gradcomp::|cuda::|\(anonymous namespace\)::|^void ", "", name[1])
        shared = re.search(r"(\d+) bytes smem", used[0])
        spilled = int(stack[2]) + int(stack[3])
        found.append(Use(file, short, int(used[1]), int(stack[1]), spilled, int(shared[1]) if shared else 0))
    return found


def _program(name: str, remedy: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Refused(f"{name} was not found; {remedy}, or put it on PATH")
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--arch", default="sm_90", help="architecture to compile for (default: sm_90)")
    options.add_places(parser, "the architecture")


def run(chosen: argparse.Namespace) -> int:
    """Compile the kernels, and write the table."""
    uses = measure(chosen.arch)
    beyond = exceeded(uses)
    rows = [(use.kernel.partition("(")[0], use.file, *map(str, use[2:])) for use in uses]
    print(columns([("kernel", "file", "registers", "stack", "spilled", "shared"), *rows]))
    print(f"\n{len(uses)} kernels, {chosen.arch}")
    print("\n".join(beyond) or "all within their budgets")
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    settings = {"arch": chosen.arch, "nvcc": version.strip().splitlines()[-1]}
    lines = [{**use._asdict(), "budget": budget_of(use)._asdict()} for use in uses]
    report.save(chosen, chosen.arch, {"settings": settings, "lines": lines})
    return int(bool(beyond))
