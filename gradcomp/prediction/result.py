"""A prediction: the step times of every way on one cluster, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradcomp.prediction.measure import HALVES, NONE, STOCK, is_baseline

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
        halved = stock.seconds / half.seconds
        # Where gradients have 16 bits already, a hook to 16 bits saves nothing, and differs by noise.
        takes_half = half.bytes < stock.bytes and halved > WORTH
        simple, how = (half, f"use {half.spec}") if takes_half else (stock, "stay dense")
        own = [line for line in self.lines if not is_baseline(line.spec)]
        if not own:
            return f"{how}: {'' if takes_half else f'{half.spec} is '}{halved:.2f} x as fast as stock. No spec was predicted."
        best = min(own, key=lambda line: line.seconds)
        gain = simple.seconds / best.seconds
        if gain <= WORTH:
            return f"{how}: the fastest spec, {best.spec}, would be {gain:.2f} x as fast."
        return (
            f"{best.spec}: {stock.seconds / best.seconds:.2f} x as fast as stock, {half.seconds / best.seconds:.2f} x as "
            f"{half.spec}, and {best.seconds / self[NONE].seconds:.2f} x the time of no communication."
        )

    def json(self) -> dict[str, Any]:
        """Return everything as plain numbers and texts."""
        return {**asdict(self), "advice": self.advice}

    def __str__(self) -> str:
        width = max(len(line.spec) for line in self.lines)
        row = "{:{}}  {:>9}  {:>6}  {:>14}  {:>10}  {:>10}  {:>13}  {:>11}".format
        heads = ("ms a step", "x none", "speed, x stock", "kernels ms", "waiting ms", "bytes", "compression")
        rows = [row("", width, *heads)]
        for line in sorted(self.lines, key=lambda line: line.seconds):
            total, encoding, waiting = (f"{1e3 * each:.1f}" for each in (line.seconds, line.encoding, line.waiting))
            times, speed = line.seconds / self[NONE].seconds, self[STOCK].seconds / line.seconds
            compression = f"{4 * self.parameters / line.bytes:.1f} x" if line.bytes else "-"
            cells = (total, f"{times:.2f}", f"{speed:.2f}", encoding, waiting, f"{line.bytes:,}", compression)
            rows.append(row(line.spec, width, *cells))
        reasons = {why: [spec for spec, other in self.left_out.items() if other == why] for why in self.left_out.values()}
        out = [f"left out: {', '.join(specs)}: {why}" for why, specs in reasons.items()]
        return "\n".join((f"{self.cluster}; {self.parameters:,} parameters; {self.measured}", "", *rows, *out, "", self.advice))
