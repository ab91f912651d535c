"""The lines of `lab kernels`: each case against add_ and the copy bandwidth of the same run, and the promised figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from laboratory.kernels.arrays import (
    ADD,
    ADD_3,
    BINGRAD_B,
    COPY,
    FEEDBACK,
    HEAVIEST,
    ORQ_3,
    ORQ_5,
    ORQ_9,
    ROUND_3,
    ROUND_B,
    SDAGC,
    SDAGC_SIMULATED,
    SIMULATED,
    SKETCH,
    TAKE_TOPK,
    TORCH_HEAVIEST,
    TORCH_SKETCH,
    TORCH_STEP,
    TORCH_TOPK,
)
from laboratory.report.tables import columns, figure, milliseconds
from laboratory.timing import Case, Spread, ratio


class Target(NamedTuple):
    """A promise on one core: at most so many times add_ of as many entries."""

    most: float
    entries: str


TARGETS = {
    FEEDBACK: Target(5.0, "16.8M"),
    SIMULATED: Target(7.0, "16.8M"),
    SDAGC: Target(2.5, "16.8M"),
    SDAGC_SIMULATED: Target(4.5, "16.8M"),
    SKETCH: Target(3.5, "4.2M"),
    HEAVIEST: Target(6.0, "4.2M"),
    ORQ_3: Target(4.5, "16.8M"),
    ORQ_5: Target(6.0, "16.8M"),
    ORQ_9: Target(7.5, "16.8M"),
    BINGRAD_B: Target(4.0, "16.8M"),
}

# Promised shares of a GPU's copy bandwidth, on 64 M entries or more.
SHARES = {f"{SDAGC}, momentum": 0.8, ROUND_3: 0.5, ADD_3: 0.8, ROUND_B: 0.6}


class Faster(NamedTuple):
    """A promise on a GPU: at least so many times as fast as torch at the same work."""

    ours: tuple[str, ...]
    torchs: tuple[str, ...]
    least: float


FASTER = (
    Faster((TAKE_TOPK,), (TORCH_TOPK,), 4),
    Faster((FEEDBACK,), (TORCH_STEP,), 4),
    Faster((SKETCH, HEAVIEST), (TORCH_SKETCH, TORCH_HEAVIEST), 15),
)

Line = dict[str, Any]


def lines(cases: Sequence[Case], seconds: Mapping[str, Sequence[float]]) -> list[Line]:
    """Return the figures of every case."""
    found: list[Line] = []
    for case in cases:
        spread = Spread.of(seconds[case.name])
        to_add = ratio(seconds, case.name, ADD)
        line: Line = {
            "name": case.name,
            "ms": {key: 1000 * value for key, value in spread._asdict().items()},
            "ratio_to_add": to_add._asdict(),
            "bytes": case.bytes_moved,
            "gb_per_s": None,
            "share_of_copy": None,
        }
        if case.bytes_moved:
            copied = next(c.bytes_moved for c in cases if c.name == COPY)
            assert copied is not None
            line["gb_per_s"] = case.bytes_moved / spread.median / 1e9
            line["share_of_copy"] = case.bytes_moved / copied / ratio(seconds, case.name, COPY).median
        found.append(line)
    return found


def table(found: Sequence[Line]) -> str:
    """Write the lines as a table."""
    rows = [("", "ms", "min..max", "x add_", "min..max", "MB moved", "GB/s", "of copy")]
    for line in found:
        ms, to_add = line["ms"], line["ratio_to_add"]
        megabytes = None if line["bytes"] is None else line["bytes"] / 1e6
        percent = None if line["share_of_copy"] is None else 100 * line["share_of_copy"]
        rows.append(
            (
                line["name"],
                milliseconds(ms["median"] / 1000),
                "..".join(milliseconds(ms[end] / 1000) for end in ("low", "high")),
                f"{to_add['median']:.2f}",
                f"{to_add['low']:.2f}..{to_add['high']:.2f}",
                figure(megabytes, "{:.4g}"),
                figure(line["gb_per_s"], "{:.3g}"),
                figure(percent, "{:.0f} %"),
            )
        )
    return columns(rows)


def targets(found: Sequence[Line]) -> list[dict[str, Any]]:
    """Judge the promises on one core."""
    medians = {line["name"]: line["ratio_to_add"]["median"] for line in found}
    return [
        {"name": name, "at_most": most, "of_entries": entries, "found": medians[name], "kept": medians[name] <= most}
        for name, (most, entries) in TARGETS.items()
    ]


def sentence(target: Mapping[str, Any]) -> str:
    """Say a promise and the measured figure."""
    if "at_most" in target:
        promised = f"promised at most {target['at_most']:g} x (one core, {target['of_entries']})"
        return f"{target['name']}: {target['found']:.2f} x add_, {promised}"
    return f"{target['name']}: {target['found']:.2f} of the {target['of']}, promised at least {target['at_least']:g}"


def gpu_targets(found: Sequence[Line]) -> list[dict[str, Any]]:
    """Judge the promises on a GPU."""
    shares = {line["name"]: line["share_of_copy"] for line in found}
    ms = {line["name"]: line["ms"]["median"] for line in found}
    kept: list[dict[str, Any]] = []
    for name, least in SHARES.items():
        kept.append({"name": name, "of": "copy bandwidth", "at_least": least, "found": shares[name]})
    for ours, torchs, least in FASTER:
        speedup = sum(ms[name] for name in torchs) / sum(ms[name] for name in ours)
        kept.append({"name": " + ".join(ours), "of": f"speed of {' + '.join(torchs)}", "at_least": least, "found": speedup})
    return [{**each, "kept": each["found"] >= each["at_least"]} for each in kept]
