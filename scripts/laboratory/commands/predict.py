"""Write benchmarks/gpu.md: how long kernels should take on an H200, beside the times that GPUs have measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from laboratory import options
from laboratory.kernels import prediction
from laboratory.kernels.prediction import H200
from laboratory.machine import ROOT

EXAMPLES = """\
example:
  scripts/lab predict      # after every gpu_check"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--size", type=options.size, default="64M", help="entries (default: 64M)")
    parser.add_argument(
        "--out", type=options.folder, default=ROOT / "benchmarks", metavar="FOLDER", help="(default: benchmarks)"
    )


def run(chosen: argparse.Namespace) -> int:
    """Write the page."""
    checks = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob("gpu-*.json"))]
    found = prediction.measured(checks, chosen.size, H200)
    path = Path(chosen.out) / "gpu.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(prediction.page(chosen.size, H200, found))
    print(f"{prediction.table(chosen.size, H200, found)}\n\nwritten: {path}")
    return 0
