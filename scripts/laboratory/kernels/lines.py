"""The lines of `lab kernels`: each case against add_ and the copy bandwidth of the same run, and the promised figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laboratory.kernels import cases as c
from laboratory.report.tables import columns, figure, milliseconds
from laboratory.timing import Case, Spread, ratio

Line = dict[str, Any]

# Promises on one core: at most so many times add_ of as many entries.
TARGETS = {
    c.FEEDBACK: (5.0, "16.8M"),
    c.SIMULATED: (7.0, "16.8M"),
    c.SDAGC: (2.5, "16.8M"),
    c.SDAGC_SIMULATED: (4.5, "16.8M"),
    c.SKETCH: (3.5, "4.2M"),
    c.HEAVIEST: (6.0, "4.2M"),
    c.ORQ_3: (4.5, "16.8M"),
    c.ORQ_5: (6.0, "16.8M"),
    c.ORQ_9: (7.5, "16.8M"),
    c.BINGRAD_B: (4.0, "16.8M"),
}

# Promised shares of a GPU's copy bandwidth, on 64 M entries or more.
SHARES = {f"{c.SDAGC}, momentum": 0.8, c.ROUND_3: 0.5, c.ADD_3: 0.8, c.ROUND_B: 0.6}

# Promises on a GPU: these cases are at least so many times as fast as torch's at the same work.
FASTER = (
    ((c.TAKE_TOPK,), (c.TORCH_TOPK,), 4),
    ((c.FEEDBACK,), (c.TORCH_STEP,), 4),
    ((c.SKETCH, c.HEAVIEST), (c.TORCH_SKETCH, c.TORCH_HEAVIEST), 15),
)


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
    """Write the lines as a table. predicted: milliseconds by case, where a prediction is known."""
    rows = [("", "ms", "min..max", "predicted", "x add_", "min..max", "MB moved", "GB/s", "of copy")]
    for line in found:
        ms, to_add = line["ms"], line["ratio_to_add"]
        rows.append(
            (
                line["name"],
                milliseconds(ms["median"] / 1000),
                "..".join(milliseconds(ms[end] / 1000) for end in ("low", "high")),
                figure(predicted.get(line["name"]), "{:.4f}"),
                f"{to_add['median']:.2f}",
                f"{to_add['low']:.2f}..{to_add['high']:.2f}",
                figure(line["bytes"] and line["bytes"] / 1e6, "{:.4g}"),
                figure(line["gb_per_s"], "{:.3g}"),
                figure(line["share_of_copy"] and 100 * line["share_of_copy"], "{:.0f} %"),
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


def gpu_targets(found: Sequence[Line]) -> list[dict[str, Any]]:
    """Judge the promises on a GPU."""
    shares = {line["name"]: line["share_of_copy"] for line in found}
    ms = {line["name"]: line["ms"]["median"] for line in found}
    judged: list[tuple[str, str, float, float]] = [
        (name, "copy bandwidth", least, shares[name]) for name, least in SHARES.items()
    ]
    for ours, torchs, least in FASTER:
        speedup = sum(ms[name] for name in torchs) / sum(ms[name] for name in ours)
        judged.append((" + ".join(ours), f"speed of {' + '.join(torchs)}", least, speedup))
    return [{"name": name, "of": of, "at_least": least, "found": got, "kept": got >= least} for name, of, least, got in judged]


def sentence(target: Mapping[str, Any]) -> str:
    """Say a promise and the measured figure."""
    if "at_most" in target:
        promised = f"promised at most {target['at_most']:g} x (one core, {target['of_entries']})"
        return f"{target['name']}: {target['found']:.2f} x add_, {promised}"
    return f"{target['name']}: {target['found']:.2f} of the {target['of']}, promised at least {target['at_least']:g}"
