"""The command line of the prediction: python -m gradcomp predict and profile."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from gradcomp.prediction import measure, workload
from gradcomp.prediction.link import Link, bandwidth_of, seconds_of
from gradcomp.prediction.predict import learns, predict, processor
from gradcomp.prediction.profile import H100, profile_here
from gradcomp.spec import names

EXAMPLES = """\
examples:
  python -m gradcomp predict --model torchvision.models:resnet50 --ranks 8 --bandwidth 10Gbit/s --forward 30ms --backward 60ms
  python -m gradcomp predict --model shapes.json --ranks 32 --hosts 4 --bandwidth 1Gbit/s --forward 0.1s --backward 0.2s \\
      --specs topk 'topk; *.bias=dense' topk:by_host=true accumulate:steps=4 --json prediction.json

--specs also takes baselines: none, stock, bf16, fp16, accumulate:steps=N. The first four are always predicted. A semicolon
begins a rule for layers. A warm-up (warmup=N) counts as over. A compressor that learns is left out.

Kernels are timed on this machine, with --threads of torch. For another machine, write its profile there (python -m gradcomp
profile FILE), and pass --profile FILE here. --profile h100 has kernels as timed on an H100."""

PROFILE_EXAMPLES = """\
example:
  python -m gradcomp profile machine.json --threads 4
  python -m gradcomp predict --profile machine.json --model shapes.json --ranks 8 --forward 0.1s --backward 0.2s

Takes some minutes of a quiet machine."""


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
    parser.add_argument("--forward", required=True, help="time of the forward pass, like 30ms")
    parser.add_argument("--backward", required=True, help="time of the backward pass")
    parser.add_argument("--optimizer", default="0s", help="time of the optimizer's step (default: 0s)")
    parser.add_argument("--bucket-mb", type=float, default=25, help="(default: 25)")
    _add_shared(parser)
    parser.add_argument("--profile", metavar="NAME", help=f"predict for another machine: its file, or {H100}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def add_profile_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command that writes a profile."""
    parser.epilog, parser.formatter_class = PROFILE_EXAMPLES, argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, metavar="FILE")
    _add_shared(parser)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    specs = "separated by spaces; quote a spec that has rules for layers (default: every compressor's default)"
    parser.add_argument("--specs", nargs="+", action="extend", metavar="SPEC", help=specs)
    parser.add_argument("--device", help="cpu or cuda, where gradients will lie (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each rank (default: 1)")


def _begin(chosen: argparse.Namespace) -> list[str] | None:
    """Set torch's threads. Return the specs."""
    if chosen.threads < 1:
        raise ValueError(f"--threads {chosen.threads} must be at least 1")
    torch.set_num_threads(chosen.threads)
    return None if chosen.specs is None else [spec.strip() for spec in chosen.specs]


def run(chosen: argparse.Namespace) -> None:
    """Predict, print the table, and write the figures if asked."""
    specs = _begin(chosen)
    forward, backward, optimizer, latency, latency_inside = (
        seconds_of(getattr(chosen, name), f"--{name.replace('_', '-')}")
        for name in ("forward", "backward", "optimizer", "latency", "latency_inside")
    )
    bandwidth, inside = bandwidth_of(chosen.bandwidth, "--bandwidth"), bandwidth_of(chosen.inside, "--inside")
    found = predict(
        workload.load(chosen.model),
        chosen.ranks,
        hosts=chosen.hosts,
        link=Link(bandwidth, latency, inside, latency_inside),
        forward=forward,
        backward=backward,
        optimizer=optimizer,
        specs=specs,
        bucket_mb=chosen.bucket_mb,
        device=chosen.device,
        profile=chosen.profile,
        tell=_tell,
    )
    print(found)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found.json(), indent=1) + "\n")


def run_profile(chosen: argparse.Namespace) -> None:
    """Measure this machine, and write its profile."""
    specs, device = _begin(chosen) or names(), workload.device_for(None, chosen.device)
    known = [spec for spec in specs if spec != measure.NONE and not learns(spec)]
    chosen.file.write_text(profile_here(known, processor(device), device, _tell).text())
    print(f"written: {chosen.file}")


def _tell(text: str, share: float) -> None:
    """Show progress."""
    print(f"{100 * share:3.0f} %  {text}", file=sys.stderr, flush=True)
