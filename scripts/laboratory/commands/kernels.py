"""Time every kernel, and whole steps of the simulator, against copy_, add_ and plain torch."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from laboratory import machine, options
from laboratory.kernels import lines, prediction
from laboratory.kernels.cases import Arrays, cases
from laboratory.refusal import Refused
from laboratory.report import results
from laboratory.report.progress import Progress
from laboratory.timing import clock, interleave

EXAMPLES = """\
examples:
  scripts/lab kernels                                # half a minute
  scripts/lab kernels --size 4.2M --name 4m          # the size of the sketches' bounds
  scripts/lab kernels --device cuda --size 64M
  scripts/lab kernels --predict                      # writes benchmarks/gpu.md; times nothing

Times are medians over rounds in which all cases take turns. Ratios are taken within rounds."""

RECORDS, PAGE, PAGE_SIZE = machine.ROOT / "benchmarks" / "results", "gpu.md", 64_000_000


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    parser.add_argument("--size", type=options.size, default="16.8M", help="entries (default: 16.8M)")
    parser.add_argument(
        "--layers",
        type=options.positive,
        default=1,
        help="number of nearly equal layers of the entries (default: 1)",
    )
    parser.add_argument("--threads", type=options.positive, default=1, help="threads of a kernel on a CPU (default: 1)")
    parser.add_argument(
        "--rounds", type=options.positive, default=15, help="rounds in which each case takes a turn (default: 15)"
    )
    parser.add_argument(
        "--predict", action="store_true", help="only write gpu.md: times on an H100 and an H200, predicted and recorded"
    )
    options.add_places(parser, "the device and its model")


def run(chosen: argparse.Namespace) -> int:
    """Time the cases, and write the table."""
    if chosen.predict:
        return predict()
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch finds no GPU; use --device cpu, or a machine with a GPU")
    torch.set_num_threads(chosen.threads)
    every, progress = cases(Arrays(chosen.size, device, chosen.layers)), Progress()
    seconds = interleave(
        every,
        chosen.rounds,
        clock(device),
        lambda done: progress(f"round {done} of {chosen.rounds}", done / chosen.rounds),
    )
    progress.end()
    found, predicted = lines.lines(every, seconds), dict[str, float]()
    settings = {"device": chosen.device, "size": chosen.size, "layers": chosen.layers, "rounds": chosen.rounds}
    result: dict[str, Any] = {"settings": settings, "lines": found, "targets": lines.targets(found)}
    model = machine.cpu_name()
    if device.type == "cuda":
        described = machine.describe_gpu()
        model, result["targets"] = described["gpu"], lines.gpu_targets(found)
        packages = machine.versions(("torch", "numpy", "horovod"))
        result |= {"machine": machine.describe() | described, "versions": {**packages, "cuda": torch.version.cuda}}
        if gpu := prediction.known(model):
            predicted = prediction.milliseconds(chosen.size, gpu)
    else:
        settings["threads"] = chosen.threads
    print(f"{chosen.size:,} entries in {chosen.layers} layer(s), k = 0.1 %, {settings}\n")
    print(lines.table(found, predicted))
    print("\n".join(map(lines.sentence, result["targets"])))
    results.save(chosen, results.path_of(chosen, f"{chosen.device}-{machine.slug(model)}"), result)
    return 0


def predict() -> int:
    """Write the page of predicted times beside those of the records."""
    path = RECORDS.parent / PAGE
    path.write_text(prediction.page(PAGE_SIZE, records()))
    print(f"written: {path}")
    return 0


def records() -> list[dict[str, Any]]:
    """Read the committed results of kernels on GPUs."""
    paths = [path for kind in ("kernels-cuda-*.json", "gpu-*.json") for path in sorted(RECORDS.glob(kind))]
    return [json.loads(path.read_text()) for path in paths]
