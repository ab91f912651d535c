"""Times whole steps of the simulator in two checkouts, in turns, and says what the ratio of their times stays below.

    scripts/paired.py --before ../before --out benchmarks/results/paired-steps.json

Each checkout has a process of its own with its own built package. They take turns in pairs, in changing order; a pair's ratio
is what counts, and of all ratios the median, with bounds by order statistics that hold whatever the ratios' distribution is.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SPECS = ("topk", "sdagc", "orq")

WORKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch, gradcomp
assert gradcomp.__file__.startswith(sys.argv[1]), gradcomp.__file__
torch.set_num_threads(1)
torch.manual_seed(0)
shapes = {f"layer{i}.weight": (1024, 1024) for i in range(int(sys.argv[3]))}
grads = [{name: torch.randn(shape) for name, shape in shapes.items()}]
simulation = gradcomp.Simulation(sys.argv[2], shapes, 1)
for _ in range(3):
    simulation.step(grads)
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    for _ in range(int(line)):
        simulation.step(grads)
    print((time.perf_counter() - began) / int(line), flush=True)
"""


class Worker:
    """A process that times steps of one checkout."""

    def __init__(self, checkout: Path, spec: str, layers: int):
        command = [sys.executable, "-c", WORKER, str(checkout), spec, str(layers)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=checkout)
        self._read()

    def seconds(self, steps: int) -> float:
        """The mean of so many steps."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return float(self._read())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self.process.wait()}; its message is above")
        return line.strip()


def bounds(ratios: Sequence[float]) -> tuple[float, float]:
    """What the median of the ratios' distribution lies between, with 95 % on either side: order statistics of a fair coin."""
    n, ordered = len(ratios), sorted(ratios)
    below, k = 0.0, 0
    while below + math.comb(n, k) / 2**n <= 0.05:
        below += math.comb(n, k) / 2**n
        k += 1
    return ordered[max(0, k - 1)], ordered[min(n - 1, n - k)]


def compare(before: Path, after: Path, spec: str, layers: int, pairs: int, steps: int) -> dict[str, Any]:
    workers = [Worker(before, spec, layers), Worker(after, spec, layers)]
    times: list[list[float]] = [[], []]
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            times[side].append(workers[side].seconds(steps))
    for worker in workers:
        worker.end()
    ratios = [new / old for old, new in zip(*times, strict=True)]
    low, high = bounds(ratios)
    found = {"ratio": statistics.median(ratios), "low": low, "high": high, "pairs": pairs, "steps": steps}
    return found | {"before_ms": 1000 * statistics.median(times[0]), "after_ms": 1000 * statistics.median(times[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the checkout to compare with, built in place")
    parser.add_argument("--after", type=Path, default=ROOT, help="the other one (default: this)")
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--layers", type=int, default=16, help="layers of 2^20 entries (default: 16)")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn (default: 3)")
    parser.add_argument("--out", type=Path, help="a JSON file to be written")
    asked = parser.parse_args()
    found = {}
    for spec in asked.specs:
        found[spec] = own = compare(asked.before.resolve(), asked.after.resolve(), spec, asked.layers, asked.pairs, asked.steps)
        print(
            f"{spec:8} {own['before_ms']:7.2f} -> {own['after_ms']:7.2f} ms a step, "
            f"ratio {own['ratio']:.3f} (95 %: {own['low']:.3f} to {own['high']:.3f})",
            flush=True,
        )
    if asked.out:
        from benchlib import machine

        command = (
            "scripts/paired.py --before CHECKOUT " + f"--layers {asked.layers} --pairs {asked.pairs} --steps {asked.steps}"
        )
        asked.out.write_text(json.dumps(machine.origin(command) | {"steps": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
