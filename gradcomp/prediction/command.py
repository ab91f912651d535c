"""The command line of the prediction: gradcomp predict."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradcomp.prediction.link import Link, bandwidth_of, seconds_of
from gradcomp.prediction.predict import Shapes, predict, shapes_of

EXAMPLES = """\
examples:
  gradcomp predict --model torchvision.models:resnet50 --ranks 8 --bandwidth 10Gbit/s --forward 30ms --backward 60ms
  gradcomp predict --model shapes.json --ranks 32 --hosts 4 --bandwidth 1Gbit/s --forward 0.1s --backward 0.2s \\
      --specs topk 'topk; *.bias=dense' topk:by_host=true accumulate:steps=4 --json prediction.json
  gradcomp predict --fsdp --model shapes.json --ranks 8 --bandwidth 10Gbit/s --forward 30ms --backward 60ms \\
      --specs 'blocks weights=bf16' 'blocks weights=blocks:bits=8'

--specs also takes baselines: none, stock (plain DDP), bf16, fp16, accumulate:steps=N. The first four are always predicted. A
semicolon begins a rule for layers. A warm-up (warmup=N) counts as over. A compressor that learns is left out.
'sign every=30' predicts local steps, on average, which train differently and are not recommended by it.

--fsdp always predicts none, stock, 'stock weights=bf16' and 'bf16 weights=bf16', which also reduces gradients in bfloat16.
Specs that do not act over shards are left out.

Kernels are timed on this machine, with --threads of torch: run it on a machine like the cluster's."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog, parser.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--model", required=True, help="a .json file of {name: shape}, or package.module:function, or file.py:function"
    )
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--hosts", type=int, help="(default: one for each rank)")
    parser.add_argument("--bandwidth", default="10Gbit/s", help="between hosts (default: 10Gbit/s)")
    parser.add_argument("--latency", default="50us", help="of a message between hosts (default: 50us)")
    parser.add_argument("--inside", default="40Gbit/s", help="bandwidth inside a host (default: 40Gbit/s)")
    parser.add_argument("--latency-inside", default="10us", help="of a message inside a host (default: 10us)")
    parser.add_argument("--forward", required=True, help="time of the forward pass, like 30ms")
    parser.add_argument("--backward", required=True, help="time of the backward pass")
    parser.add_argument("--optimizer", default="0s", help="time of the optimizer's step (default: 0s)")
    parser.add_argument("--bucket-mb", type=float, help="(default: 25, or a quarter of the model for updates)")
    specs = "separated by spaces; quote a spec that has rules for layers (default: every compressor's default)"
    parser.add_argument("--specs", nargs="+", action="extend", metavar="SPEC", help=specs)
    parser.add_argument("--fsdp", action="store_true", help="predict FSDP2 over shards on all ranks, in place of DDP")
    parser.add_argument("--device", help="cpu or cuda, where gradients will lie (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each rank (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run(chosen: argparse.Namespace) -> None:
    """Predict, print the table, and write the figures if asked."""
    if chosen.threads < 1:
        raise ValueError(f"--threads {chosen.threads} must be at least 1")
    torch.set_num_threads(chosen.threads)
    forward, backward, optimizer, latency, latency_inside = (
        seconds_of(getattr(chosen, name), f"--{name.replace('_', '-')}")
        for name in ("forward", "backward", "optimizer", "latency", "latency_inside")
    )
    bandwidth, inside = bandwidth_of(chosen.bandwidth, "--bandwidth"), bandwidth_of(chosen.inside, "--inside")
    found = predict(
        load(chosen.model),
        chosen.ranks,
        hosts=chosen.hosts,
        link=Link(bandwidth, latency, inside, latency_inside),
        forward_time=forward,
        backward_time=backward,
        optimizer_time=optimizer,
        specs=chosen.specs and [spec.strip() for spec in chosen.specs],
        fsdp=chosen.fsdp,
        bucket_mb=chosen.bucket_mb,
        device=chosen.device,
        tell=_tell,
    )
    print(found)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found.json(), indent=1) + "\n")


def load(text: str) -> nn.Module | Shapes:
    """Read a JSON file of {name: shape}, or make the model, without memory, that package.module:function returns."""
    if text.endswith(".json"):
        try:
            content: Any = json.loads(Path(text).read_text())
            return shapes_of({str(name): list(shape) for name, shape in content.items()})
        except (OSError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f'{text} holds no shapes ({error}); write {{"name": [rows, columns], ...}} into it') from None
    module, _, function = text.partition(":")
    sys.path.append(str(Path.cwd()))  # a console script, unlike python -m, does not look there
    try:
        with torch.device("meta"):
            made = getattr(importlib.import_module(module.removesuffix(".py").replace("/", ".")), function)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"model {text!r} is neither a .json file nor a function here that needs no arguments ({error}); write for example "
            "torchvision.models:resnet50"
        ) from None
    if not isinstance(made, nn.Module):
        raise ValueError(f"{text} returns a {type(made).__name__}; name a function that returns the model")
    return made


def _tell(text: str, share: float) -> None:
    """Show progress."""
    print(f"{100 * share:3.0f} %  {text}", file=sys.stderr, flush=True)
