"""Time every kernel, and whole steps of the simulator, against copy_, add_ and plain torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from laboratory import kernel_cases as c
from laboratory import kernel_prediction, machine, options, report
from laboratory.options import Refused
from laboratory.report import Progress, figure, milliseconds
from laboratory.timing import Case, Spread, clock, interleave, ratio

Line = dict[str, Any]

EXAMPLES = """\
examples:
  scripts/lab kernels                                # half a minute
  scripts/lab kernels --device cuda --size 64M

Times are medians over rounds in which all cases take turns. Ratios are taken within rounds."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    parser.add_argument("--size", type=options.size, default="16.8M", help="entries (default: 16.8M)")
    layers = "number of nearly equal layers of the entries (default: 1)"
    parser.add_argument("--layers", type=options.positive, default=1, help=layers)
    rounds = "rounds in which each case takes a turn (default: 15)"
    parser.add_argument("--rounds", type=options.positive, default=15, help=rounds)
    options.add_places(parser, "the device and its model")


def run(chosen: argparse.Namespace) -> int:
    """Time the cases, and write the table."""
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch finds no GPU; use --device cpu, or a machine with a GPU")
    torch.set_num_threads(1)
    every, progress = c.cases(c.Arrays(chosen.size, device, chosen.layers)), Progress()
    seconds = interleave(
        every,
        chosen.rounds,
        clock(device),
        lambda done: progress(f"round {done} of {chosen.rounds}", done / chosen.rounds),
    )
    progress.end()
    found = lines(every, seconds)
    settings = {"device": chosen.device, "size": chosen.size, "layers": chosen.layers, "rounds": chosen.rounds}
    result: dict[str, Any] = {"settings": settings, "lines": found}
    model = machine.cpu_name()
    predicted = dict[str, float]()
    if device.type == "cuda":
        described = machine.describe_gpu()
        model = described["gpu"]
        predicted = kernel_prediction.milliseconds(chosen.size, model)
        result |= {"machine": machine.describe() | described, "versions": machine.versions() | {"cuda": torch.version.cuda}}
    else:
        settings["threads"] = 1
    print(f"{chosen.size:,} entries in {chosen.layers} layer(s), k = 0.1 %, {settings}\n")
    print(table(found, predicted))
    report.save(chosen, f"{chosen.device}-{machine.slug(model)}", result)
    return 0


def lines(cases: Sequence[Case], seconds: Mapping[str, Sequence[float]]) -> list[Line]:
    """Return the figures of every case."""
    copied = next(case.bytes_moved for case in cases if case.name == c.COPY)
    assert copied is not None
    found: list[Line] = []
    for case in cases:
        spread, moved = Spread.of(seconds[case.name]), case.bytes_moved
        found.append(
            {
                "name": case.name,
                "ms": {key: 1000 * value for key, value in spread._asdict().items()},
                "ratio_to_add": ratio(seconds, case.name, c.ADD)._asdict(),
                "bytes": moved,
                "gb_per_s": moved / spread.median / 1e9 if moved else None,
                "share_of_copy": moved / copied / ratio(seconds, case.name, c.COPY).median if moved else None,
            }
        )
    return found


def table(found: Sequence[Line], predicted: Mapping[str, float]) -> str:
    """Write the lines as a table. predicted: milliseconds, on a GPU that is known."""
    rows = [("", "ms", "min..max", "predicted", "x add_", "min..max", "MB moved", "GB/s", "of copy")]
    for line in found:
        ms, to_add = line["ms"], line["ratio_to_add"]
        rows.append(
            (
                line["name"],
                milliseconds(ms["median"]),
                "..".join(milliseconds(ms[end]) for end in ("low", "high")),
                figure(predicted.get(line["name"]), "{:.3f}"),
                f"{to_add['median']:.2f}",
                f"{to_add['low']:.2f}..{to_add['high']:.2f}",
                figure(line["bytes"] and line["bytes"] / 1e6, "{:.4g}"),
                figure(line["gb_per_s"], "{:.3g}"),
                figure(line["share_of_copy"] and 100 * line["share_of_copy"], "{:.0f} %"),
            )
        )
    return report.columns(rows)
