"""Draws the records of gradcomp.telemetry.JsonLines: python examples/dashboard.py logs [dashboard.png]. It needs matplotlib."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Records = list[dict[str, Any]]


def read(folder: Path) -> dict[str, Records]:
    """Read every rank's records. A line that was cut off by a full disk, or by the end of its rank, is left out."""
    found = {file.stem: list(whole(file)) for file in sorted(folder.glob("rank-*.jsonl"))}
    if not any(found.values()):
        sys.exit(f"{folder} holds no rank-*.jsonl with records; pass the folder given to gradcomp.telemetry.JsonLines")
    return found


def whole(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records that can be read and have seconds: the first of a training has none."""
    for line in file.open():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["seconds"]:
            yield record


def draw(ranks: dict[str, Records], path: Path) -> None:
    """Draw six panels, of all ranks where they differ, else of the first one."""
    figure, axes = plt.subplots(1, 5, figsize=(22, 4), layout="constrained")
    bytes_, seconds, density, residual, age = axes
    first = next(iter(ranks.values()))
    steps = [record["step"] for record in first]
    bytes_.set_title("dense / sent bytes")
    bytes_.plot(steps, [record["compression"] for record in first])
    seconds.set_title("a step's milliseconds on the host")
    for name in ("total", "exposed", "encoding", "waiting", "wire"):
        seconds.plot(steps, [1e3 * record["seconds"][name] for record in first], label=name)
    density.set_title("share of the update that is not 0")
    density.plot(steps, [record["density"] for record in first], label=first[-1]["spec"])
    residual.set_title("norm of the residual")
    for rank, records in ranks.items():
        residual.plot([record["step"] for record in records], [record["residual"] for record in records], label=rank)
    age.set_title("mean steps since an entry was sent, by bucket")
    for i, bucket in enumerate(first[-1]["buckets"]):
        if "age" in bucket:
            age.plot(steps, [record["buckets"][i]["age"] for record in first], label=f"{bucket['layers'][0]} ...")
    for panel in axes.flat:
        panel.set_xlabel("step")
        panel.set_ylim(bottom=0)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(fontsize="small")
    for warning in {text for records in ranks.values() for text in records[-1]["warnings"]}:
        print(f"warning: {warning}")
    figure.savefig(path, dpi=80)
    print(f"drawn: {path}")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    draw(read(Path(sys.argv[1])), Path(sys.argv[2] if len(sys.argv) == 3 else "dashboard.png"))
