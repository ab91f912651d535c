"""A prediction: the step times of every way on one cluster, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradcomp.prediction.baselines import HALVES, NONE, STOCK

# A way is advised if it is this much faster than stock DDP or bf16.
WORTH = 1.03


@dataclass(frozen=True)
class Line:
    """The step of a spec or a baseline.

    Attributes:
        spec: The spec, or the baseline's name.
        seconds: The time of a batch.
        encoding: Seconds of compressing and decompressing.
        waiting: Seconds of waiting for messages with nothing else to do.
        bytes: Handed to the network by a rank.
    """

    spec: str
    seconds: float
    encoding: float
    waiting: float
    bytes: int

    def speedup(self, other: Line) -> float:
        """Return how many times faster this is than another."""
        return other.seconds / self.seconds


@dataclass(frozen=True)
class Prediction:
    """The lines of all specs and baselines, which print as a table.

    Attributes:
        cluster: The cluster, in words.
        measured: Where kernels were timed.
        parameters: Entries of the model.
        lines: A line for each spec and baseline; prediction["topk"] finds one.
        left_out: Specs without a line, with the reason.
    """

    cluster: str
    measured: str
    parameters: int
    lines: Sequence[Line]
    left_out: dict[str, str]

    def __getitem__(self, spec: str) -> Line:
        for line in self.lines:
            if line.spec == spec:
                return line
        if spec in self.left_out:
            raise KeyError(f"{spec!r} was left out: {self.left_out[spec]}")
        raise KeyError(f"{spec!r} was not predicted; known: {', '.join(line.spec for line in self.lines)}")

    @property
    def advice(self) -> str:
        """Say in a sentence what to use. A step without communication, and one that trains differently, are no candidates."""
        stock, half = self[STOCK], min((self[name] for name in HALVES), key=lambda line: line.seconds)
        # Where gradients have 16 bits already, a hook to 16 bits saves nothing, and differs by noise.
        takes_half = half.bytes < stock.bytes and half.speedup(stock) > WORTH
        simple, how = (half, f"use {half.spec}") if takes_half else (stock, "stay dense")
        own = [
            line for line in self.lines if line.spec not in (NONE, STOCK, *HALVES) and not line.spec.startswith("accumulate")
        ]
        if not own:
            subject = "" if takes_half else f"{half.spec} is "
            return f"{how}: {subject}{half.speedup(stock):.2f} x as fast as stock. No spec was predicted."
        best = min(own, key=lambda line: line.seconds)
        if best.speedup(simple) <= WORTH:
            return f"{how}: the fastest spec, {best.spec}, would be {best.speedup(simple):.2f} x as fast."
        return (
            f"{best.spec}: {best.speedup(stock):.2f} x as fast as stock, {best.speedup(half):.2f} x as {half.spec}, and "
            f"{best.seconds / self[NONE].seconds:.2f} x the time of no communication."
        )

    def json(self) -> dict[str, Any]:
        """Return everything as plain numbers and texts."""
        return {**asdict(self), "advice": self.advice}

    def __str__(self) -> str:
        stock = self[STOCK]
        rows: list[tuple[str, ...]] = [
            ("", "ms a step", "x none", "speed, x stock", "kernels ms", "waiting ms", "bytes", "compression")
        ]
        rows += [self._row(line, stock) for line in sorted(self.lines, key=lambda line: line.seconds)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = "\n".join(
            "  ".join(cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        )
        reasons = {why: [spec for spec, other in self.left_out.items() if other == why] for why in self.left_out.values()}
        out = "".join(f"\nleft out: {', '.join(specs)}: {why}" for why, specs in reasons.items())
        return f"{self.cluster}; {self.parameters:,} parameters; {self.measured}\n\n{table}{out}\n\n{self.advice}"

    def _row(self, line: Line, stock: Line) -> tuple[str, ...]:
        times = line.seconds / self[NONE].seconds, line.speedup(stock)
        ratio = torch.float32.itemsize * self.parameters / line.bytes if line.bytes else 0.0
        compression = f"{ratio:.{0 if ratio >= 10 else 1}f} x" if line.bytes else "-"
        ms = (f"{1e3 * seconds:.1f}" for seconds in (line.seconds, line.encoding, line.waiting))
        return line.spec, next(ms), *(f"{ratio:.2f}" for ratio in times), *ms, f"{line.bytes:,}", compression
