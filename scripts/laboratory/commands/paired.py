"""Time whole steps of the simulator in two checkouts in turns, and bound the ratio of their times.

Each checkout has a process and a built package of its own. They take turns in pairs, in changing order. Each pair gives one
ratio; the result is the median of all ratios, with bounds by order statistics, which hold for every distribution.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from laboratory import machine, options
from laboratory.refusal import Refused
from laboratory.report import results
from laboratory.report.progress import Progress
from laboratory.report.tables import columns

SPECS = ["topk", "sdagc", "orq"]

EXAMPLES = """\
example:
  scripts/lab paired --before ../before      # that checkout must be set up, too"""

# Each side of the median's bounds is missed with this probability.
MISS_PROBABILITY = 0.05

WORKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch, gradcomp
if gradcomp.__file__ != sys.argv[1] + "/gradcomp/__init__.py":
    sys.exit(f"Python imports {gradcomp.__file__} instead of the gradcomp in {sys.argv[1]}")
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
        self._checkout = checkout
        self._read()

    def seconds(self, steps: int) -> float:
        """Return the mean seconds of some steps."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return float(self._read())

    def end(self) -> int:
        """End the process. Return its status."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(timeout=60)

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Refused(f"the worker of {self._checkout.name} ended with status {self.end()}; its message is above")
        return line.strip()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--before", type=options.checkout, required=True, metavar="FOLDER", help="the checkout to compare with")
    this = str(machine.ROOT)
    parser.add_argument("--after", type=options.checkout, default=this, metavar="FOLDER", help="the other one (default: this)")
    parser.add_argument("--specs", type=options.specs, default=SPECS, help=f"(default: {','.join(SPECS)})")
    parser.add_argument("--layers", type=options.positive, default=16, help="layers of 2^20 entries (default: 16)")
    parser.add_argument("--pairs", type=options.positive, default=60, help="pairs of turns (default: 60)")
    parser.add_argument("--steps", type=options.positive, default=3, help="steps of a turn (default: 3)")
    options.add_places(parser, "the CPU's model")


def run(chosen: argparse.Namespace) -> int:
    """Time the steps of every spec, and write the table."""
    found, progress = {}, Progress()
    rows = [["", "before, ms a step", "after", "ratio", "95 %"]]
    for spec in chosen.specs:
        found[spec] = own = compare(chosen, spec, progress)
        times = [f"{own['before_ms']:.2f}", f"{own['after_ms']:.2f}"]
        rows.append([spec, *times, f"{own['ratio']:.3f}", f"{own['low']:.3f}..{own['high']:.3f}"])
    progress.end()
    print(columns(rows))
    results.save(chosen, results.path_of(chosen, f"steps-{machine.slug(machine.cpu_name())}"), {"steps": found})
    return 0


def compare(chosen: argparse.Namespace, spec: str, tell: Callable[[str, float], object]) -> dict[str, Any]:
    """Time one spec's steps in both checkouts."""
    times: list[list[float]] = [[], []]
    with contextlib.ExitStack() as running:
        workers = []
        for checkout in (chosen.before, chosen.after):
            workers.append(Worker(checkout.resolve(), spec, chosen.layers))
            running.callback(workers[-1].end)
        for pair in range(chosen.pairs):
            for side in (0, 1) if pair % 2 else (1, 0):
                times[side].append(workers[side].seconds(chosen.steps))
            tell(f"{spec}: pair {pair + 1} of {chosen.pairs}", (pair + 1) / chosen.pairs)
    ratios = [after / before for before, after in zip(*times, strict=True)]
    low, high = bounds(ratios)
    found = {"ratio": statistics.median(ratios), "low": low, "high": high, "pairs": chosen.pairs, "steps": chosen.steps}
    return found | {"before_ms": 1000 * statistics.median(times[0]), "after_ms": 1000 * statistics.median(times[1])}


def bounds(ratios: Sequence[float]) -> tuple[float, float]:
    """Bound the median of the ratios' distribution with 95 % on either side: order statistics of a fair coin."""
    n, ordered = len(ratios), sorted(ratios)
    below, k = 0.0, 0
    while below + math.comb(n, k) / 2**n <= MISS_PROBABILITY:
        below += math.comb(n, k) / 2**n
        k += 1
    return ordered[max(0, k - 1)], ordered[min(n - 1, n - k)]
