"""Write the profiles of GPUs that predict --profile takes: kernels as predicted, the host's work as timed here."""

from __future__ import annotations

import argparse
import json

import torch

from laboratory import machine, options
from laboratory.kernels import gpu_profile
from laboratory.kernels.prediction import H100, H200

FILES = {"h100": H100, "h200": H200}

EXAMPLES = """\
example:
  scripts/lab profile      # a minute of a quiet core; after every change of the predicted kernels"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    folder = machine.ROOT / "gradcomp" / "prediction"
    parser.add_argument("--out", type=options.folder, default=folder, metavar="FOLDER", help="(default: the package)")


def run(chosen: argparse.Namespace) -> int:
    """Time the host's work, and write the files."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        timed = {spec: gpu_profile.host_costs(spec) for spec in gpu_profile.WORK}
    finally:
        torch.set_num_threads(before)
    host = f"one thread of an {machine.cpu_name()}"
    for name, gpu in FILES.items():
        path = chosen.out / f"{name}.json"
        path.write_text(json.dumps(gpu_profile.profile_of(gpu, host, timed).json(), indent=1) + "\n")
        print(f"written: {path.name}")
    return 0
