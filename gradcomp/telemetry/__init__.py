"""Telemetry: figures of the steps for JSON lines, TensorBoard or a function, and a check that all replicas are equal.

gradcomp.telemetry.watch(handle, gradcomp.telemetry.JsonLines("logs"))
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradcomp.telemetry.observer import Intervals, Record, Writer

__all__ = ["JsonLines", "TensorBoard", "numbers", "watch"]


def watch(exchange: Any, *writers: Writer, every: int = 50, check: int = 1000) -> None:
    """Record figures from the next step on. All ranks call this alike, between two steps; writers may differ.

    A second call replaces the first.

    Args:
        exchange: The object whose stats() has the figures of the exchange, or a distributed optimizer with compression.
        writers: Functions that are called with each record, such as JsonLines("logs") and TensorBoard("runs").
        every: Steps from one record to the next.
        check: Steps from one check of the replicas to the next; 0 = none. If weights differ, all ranks raise an error.

    Raises:
        TypeError: exchange or a writer is of a wrong type.
        ValueError: An interval is no whole number of steps, or the ranks' intervals differ.
    """
    for name, value in {"every": every, "check": check}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (name == "every"):
            raise ValueError(
                f"{name}={value!r} must be a whole number of steps{', at least 1' if name == 'every' else ', or 0'}"
            )
    for writer in writers:
        if not callable(writer):
            raise TypeError(f"{writer!r} is not a writer; use JsonLines(folder), TensorBoard(folder) or a function of a record")
    intervals = Intervals(every, check)
    for holder in (exchange, getattr(exchange, "compression", None), getattr(exchange, "_compression", None)):
        if (begin := getattr(holder, "_watch", None)) is not None:
            begin(writers, intervals)
            return
    raise TypeError(
        f"watch() got a {type(exchange).__name__}, which exchanges nothing by gradcomp; pass the object whose stats() has the "
        "figures of the exchange, or an optimizer with compression"
    )


class JsonLines:
    """A writer of one file per rank, FOLDER/rank-0.jsonl, with a record in each line. A file that is there is continued."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, record: Record) -> None:
        """Write a record, on a line of its own also where the last one was cut off."""
        with (self._folder / f"rank-{record['rank']}.jsonl").open("ab+") as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                file.write(b"\n")
            file.write(json.dumps(record).encode() + b"\n")


class TensorBoard:
    """A writer of one run per rank, FOLDER/rank-0, for TensorBoard, of the package tensorboard."""

    def __init__(self, folder: str | Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"TensorBoard cannot be loaded ({error}): pip install tensorboard", name=error.name) from error
        self._make, self._folder = SummaryWriter, Path(folder)
        self._runs: dict[int, Any] = {}

    def __call__(self, record: Record) -> None:
        """Write every number of a record."""
        rank = record["rank"]
        if rank not in self._runs:
            self._runs[rank] = self._make(str(self._folder / f"rank-{rank}"))
        run, step = self._runs[rank], record["step"]
        for name, number in numbers(record).items():
            run.add_scalar(name, number, step, walltime=record["time"])
        for text in record["warnings"]:
            run.add_text("gradcomp/warnings", text, step, walltime=record["time"])
        run.flush()


def numbers(record: Record) -> dict[str, float]:
    """List all numbers of a record, for a tracker.

    Args:
        record: What a writer gets.

    Returns:
        The numbers by names like "gradcomp/compression" and "gradcomp/bucket conv1.weight/residual", after the bucket's first
        layer.

    Example:
        >>> watch(handle, lambda record: mlflow.log_metrics(numbers(record), step=record["step"]))
    """
    return dict(_numbers(record, "gradcomp/"))


def _numbers(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in record.items():
        if isinstance(value, Mapping):
            found += _numbers(value, f"{prefix}{name}/")
        elif name == "buckets":
            for bucket in value:
                own = {key: each for key, each in bucket.items() if key != "entries"}
                found += _numbers(own, f"{prefix}bucket {bucket['layers'][0]}/")
        elif isinstance(value, (int, float)) and name not in ("step", "time", "rank"):
            found.append((f"{prefix}{name}", float(value)))
    return found
