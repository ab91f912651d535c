"""Count registers and memory of every CUDA kernel as nvcc compiles it, against a budget. It needs nvcc, and no GPU."""

from __future__ import annotations

import argparse

from laboratory import options
from laboratory.kernels import resources
from laboratory.report import results
from laboratory.report.tables import columns

EXAMPLES = """\
example:
  scripts/lab resources --arch sm_90      # half a minute

The exit status is 1 if a kernel exceeds its budget."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--arch", type=options.arch, default="sm_90", help="architecture to compile for (default: sm_90)")
    options.add_places(parser, "the architecture")


def run(chosen: argparse.Namespace) -> int:
    """Compile the kernels, and write the table."""
    uses = resources.measure(chosen.arch)
    beyond = resources.exceeded(uses)
    rows = [(use.kernel.partition("(")[0], use.file, *map(str, use[2:])) for use in uses]
    print(columns([("kernel", "file", "registers", "stack", "spilled", "shared"), *rows]))
    print(f"\n{len(uses)} kernels, {chosen.arch}")
    print("\n".join(beyond) or "all within their budgets")
    settings = {"arch": chosen.arch, "nvcc": resources.compiler_version()}
    lines = [{**use._asdict(), "budget": resources.budget_of(use)._asdict()} for use in uses]
    results.save(chosen, results.path_of(chosen, chosen.arch), {"settings": settings, "lines": lines})
    return int(bool(beyond))
