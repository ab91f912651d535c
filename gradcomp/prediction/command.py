"""The command line of the prediction: python -m gradcomp predict."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from gradcomp.prediction import plots, workload
from gradcomp.prediction.link import Link, bandwidth_of, seconds_of
from gradcomp.prediction.predict import Cluster
from gradcomp.prediction.sweep import Sweep

EXAMPLES = """\
examples:
  python -m gradcomp predict --model torchvision.models:resnet50 --ranks 8 --bandwidth 10Gbit/s --forward 30ms --backward 60ms
  python -m gradcomp predict --model shapes.json --ranks 32 --hosts 4 --bandwidth 1Gbit/s --forward 0.1s --backward 0.2s \\
      --specs topk 'topk; *.bias=dense' topk:by_host=true powersgd:rank=2 --json prediction.json --plots .

--specs also takes what users have without gradcomp: none, stock, bf16, fp16, powersgd:rank=N, accumulate:steps=N. The first
four are always predicted. A semicolon begins a rule for layers. A warm-up (warmup=N) counts as over. lgc learns: it is left
out.

Kernels are timed on this machine, with --threads of torch: run this where you train, or on a machine like it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog, parser.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, help="a .json file of {name: shape}, or package.module:function")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--hosts", type=int, help="(default: one for each rank)")
    parser.add_argument("--bandwidth", default="10Gbit/s", help="between hosts (default: 10Gbit/s)")
    parser.add_argument("--latency", default="50us", help="of a message between hosts (default: 50us)")
    parser.add_argument("--inside", default="40Gbit/s", help="bandwidth inside a host (default: 40Gbit/s)")
    parser.add_argument("--latency-inside", default="10us", help="of a message inside a host (default: 10us)")
    for name, what in (
        ("forward", "the forward pass"),
        ("backward", "the backward pass"),
        ("optimizer", "the optimizer's step"),
    ):
        parser.add_argument(f"--{name}", default="0s", required=name != "optimizer", help=f"time of {what}, like 30ms")
    parser.add_argument(
        "--specs",
        nargs="+",
        action="extend",
        metavar="SPEC",
        help="separated by spaces; quote a spec that has rules for layers (default: every compressor's default)",
    )
    parser.add_argument("--bucket-mb", type=float, default=25, help="(default: 25)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, where gradients will lie (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each rank (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="draw speed against ranks and bandwidth (needs matplotlib)"
    )


def run(chosen: argparse.Namespace) -> None:
    """Predict, print the table, and write what is asked for."""
    if chosen.threads < 1:
        raise ValueError(f"--threads {chosen.threads} must be at least 1")
    torch.set_num_threads(chosen.threads)
    if chosen.plots is not None:
        plots.check()
    specs = None if chosen.specs is None else [spec.strip() for spec in chosen.specs]
    times = {name: seconds_of(getattr(chosen, name), f"--{name}") for name in ("forward", "backward", "optimizer")}
    inside = bandwidth_of(chosen.inside), seconds_of(chosen.latency_inside, "--latency-inside")
    link = Link(bandwidth_of(chosen.bandwidth), seconds_of(chosen.latency, "--latency"), *inside)
    model = workload.load(chosen.model)
    types = workload.types_of(model)
    sweep = Sweep(workload.shapes_of(model), times, specs, chosen.bucket_mb, chosen.device, _tell, types)
    cluster = Cluster(chosen.ranks, chosen.hosts, link)
    found = sweep.prediction(cluster)
    print(found)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found.json(), indent=1) + "\n")
    if chosen.plots is not None:
        for path in plots.draw(chosen.plots, sweep, cluster):
            print(f"drawn: {path}")


_last = 0.0


def _tell(text: str, share: float) -> None:
    """Show progress, at most twice a second."""
    global _last
    if time.monotonic() - _last > 0.5:
        _last = time.monotonic()
        print(f"\r{100 * share:3.0f} %  {text:40}", end="\r", file=sys.stderr, flush=True)
