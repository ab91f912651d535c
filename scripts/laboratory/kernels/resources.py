"""Registers, stack, spills and shared memory of every CUDA kernel as nvcc compiles it, against a budget. It needs no GPU.

The budget: 64 registers a thread, so that half of a multiprocessor's threads fit and hide the latency of memory; no local
memory; 48 KiB of shared memory, which every device since Turing gives by default. Each exception below has its reason.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

from laboratory.kernels.compiled import every
from laboratory.refusal import Refused
from laboratory.report.tables import columns


class Use(NamedTuple):
    """A kernel's use: registers and bytes of local memory of a thread, bytes of shared memory of a block."""

    file: str
    kernel: str
    registers: int
    stack: int
    spilled: int
    shared: int


class Budget(NamedTuple):
    """The most that a kernel may use."""

    registers: int = 64
    stack: int = 0
    spilled: int = 0
    shared: int = 48 * 1024

    def exceeded(self, use: Use) -> list[str]:
        """Return a sentence for each bound that a kernel exceeds."""
        return [
            f"{use.file}: {use.kernel} uses {found} {unit}, above the {most} of its budget"
            for unit, found, most in (
                ("registers", use.registers, self.registers),
                ("bytes of stack", use.stack, self.stack),
                ("bytes spilled", use.spilled, self.spilled),
                ("bytes of shared memory", use.shared, self.shared),
            )
            if found > most
        ]


# Exceptions, by a pattern of the kernel's name.
EXCEPTIONS = {
    r"find(<.*>)?\(": (Budget(96, 560, 640), "loops index its levels, outside the reads that take the time"),
    r"^(round|add|settle)_words<": (
        Budget(80),
        "ten entries and their addresses; 768 threads have 30 KB in flight",
    ),
    r"<EstimateReader<9>": (Budget(80), "it holds nine rows of a table at once"),
}


def budget_of(use: Use) -> Budget:
    """Return a kernel's budget."""
    return next((budget for pattern, (budget, _) in EXCEPTIONS.items() if re.search(pattern, use.kernel)), Budget())


def measure(arch: str) -> list[Use]:
    """Compile every file for one architecture, for example sm_90."""
    return [use for each in every(arch) for use in parse(each.file, plain_names(each.report))]


def plain_names(text: str) -> str:
    """Demangle C++'s names."""
    program = shutil.which("c++filt")
    if program is None:
        raise Refused("c++filt was not found; apt-get install binutils")
    return subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout


def parse(file: str, text: str) -> list[Use]:
    """Read the report of ptxas, kernel by kernel."""
    found = []
    for part in text.split("Compiling entry function ")[1:]:
        name = re.match(r"'(.*?)' for", part)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers.*", part)
        if name is None or stack is None or used is None:
            raise Refused(f"{file}: nvcc's report has an unknown form:\n{part[:500]}")
        shared = re.search(r"(\d+) bytes smem", used[0])
        spilled = int(stack[2]) + int(stack[3])
        found.append(Use(file, short_name(name[1]), int(used[1]), int(stack[1]), spilled, int(shared[1]) if shared else 0))
    return found


def short_name(kernel: str) -> str:
    """Leave out of a kernel's name what all of them share."""
    return re.sub(r"gradcomp::|cuda::|\(anonymous namespace\)::|^void ", "", kernel)


def exceeded(uses: Sequence[Use]) -> list[str]:
    """Return a sentence for each exceeded bound."""
    return [sentence for use in uses for sentence in budget_of(use).exceeded(use)]


def table(uses: Sequence[Use]) -> str:
    """Write the uses as a table."""
    rows: list[tuple[str, ...]] = [("kernel", "file", "registers", "stack", "spilled", "shared")]
    for use in uses:
        name = use.kernel.partition("(")[0]
        rows.append((name, use.file, *(str(figure) for figure in use[2:])))
    return columns(rows)


def lines(uses: Sequence[Use]) -> list[dict[str, Any]]:
    """Return every use with its budget, for the result file."""
    return [{**use._asdict(), "budget": budget_of(use)._asdict()} for use in uses]
