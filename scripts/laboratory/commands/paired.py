"""Time whole steps of two checkouts in turns, and bound the ratio of their times.

Steps of the simulator, or with --hosts those of real ranks under DDP on emulated hosts. Each checkout has processes and a built
package of its own. They take turns in pairs, in changing order. Each pair gives one ratio; the result is the median of all
ratios, with bounds by order statistics, which hold for every distribution.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from laboratory import machine, options, ranks, report, timing
from laboratory.options import Refused
from laboratory.report import Progress, columns

SPECS = ["topk", "sdagc", "orq"]

EXAMPLES = """\
examples:
  scripts/lab paired --before ../before      # that checkout must be set up, too
  scripts/lab paired --before ../before --hosts 4 --rate 1gbit --layers 2 --name hosts    # needs root for the emulated hosts"""

# A worker reads numbers of steps from a named pipe, which also reaches an emulated host, and prints the mean seconds of a step.
BEGIN = """
import os, sys, time
checkout, spec, layers, orders = sys.argv[1:]
sys.path.insert(0, checkout)
import torch, gradcomp
if gradcomp.__file__ != checkout + "/gradcomp/__init__.py":
    sys.exit(f"Python imports {gradcomp.__file__} instead of the gradcomp in {checkout}")
torch.set_num_threads(1)
torch.manual_seed(0)
"""

SIMULATED = """
shapes = {f"layer{i}.weight": (1024, 1024) for i in range(int(layers))}
grads = [{name: torch.randn(shape) for name, shape in shapes.items()}]
simulation = gradcomp.Simulation(spec, shapes, 1)
step, rank, share = lambda: simulation.step(grads), 0, lambda count: count
"""

ON_HOSTS = """
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(int(layers))))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.001, 0.9)
handle = gradcomp.ddp.attach(model, spec, optimizer=optimizer)
x = torch.randn(8, 1024)
def step():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
def share(count):
    order = torch.tensor([count])
    dist.broadcast(order, 0)
    return int(order)
"""

SERVE = """
for _ in range(3):
    step()
if rank == 0:
    print("@ready", flush=True)
    lines = open(orders)
while count := share(int(lines.readline() or 0) if rank == 0 else 0):
    began = time.perf_counter()
    for _ in range(count):
        step()
    if rank == 0:
        print("@seconds", (time.perf_counter() - began) / count, flush=True)
share(0)  # no rank leaves before the others are done
os._exit(0)  # torch's threads and the process end in no fixed order, and now and then abort it
"""


@contextlib.contextmanager
def worker(checkout: Path, spec: str, layers: int, hosts: int = 0, rate: str = "none") -> Iterator[Callable[[int], float]]:
    """Run processes that time one checkout. Yield the function that takes some steps and returns the mean seconds of one.

    hosts: emulated ones; 0 simulates one rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        orders = Path(folder, "orders")
        os.mkfifo(orders)
        program = BEGIN + (ON_HOSTS if hosts else SIMULATED) + SERVE
        command = [sys.executable, "-c", program, str(checkout), spec, str(layers), str(orders)]
        if hosts:
            command = [*ranks.on_cluster(hosts, rate, "ddp"), *command]
        with subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, text=True) as process:

            def read(mark: str) -> str:
                for line in process.stdout or []:
                    if line.startswith(mark):
                        return line.removeprefix(mark)
                status = process.wait(timeout=60)
                raise Refused(f"the worker of {checkout.name} ended with status {status}; its message is above")

            read("@ready")
            with orders.open("w") as told:

                def seconds(steps: int) -> float:
                    print(steps, file=told, flush=True)
                    return float(read("@seconds"))

                yield seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--before", type=options.checkout, required=True, metavar="FOLDER", help="the checkout to compare with")
    this = str(machine.ROOT)
    parser.add_argument("--after", type=options.checkout, default=this, metavar="FOLDER", help="the other one (default: this)")
    parser.add_argument("--specs", type=options.specs, default=SPECS, help=f"(default: {','.join(SPECS)})")
    parser.add_argument("--layers", type=options.positive, default=16, help="layers of 2^20 entries (default: 16)")
    parser.add_argument("--hosts", type=options.hosts, default=0, help="emulated hosts, with one rank each")
    parser.add_argument("--rate", type=options.rate, default="none", help="of the hosts' links (default: none)")
    parser.add_argument("--pairs", type=options.positive, default=60, help="pairs of turns (default: 60)")
    parser.add_argument("--steps", type=options.positive, default=3, help="steps of a turn (default: 3)")
    options.add_places(parser, "the CPU's model")


def run(chosen: argparse.Namespace) -> int:
    """Time the steps of every spec, and write the table."""
    found, progress = {}, Progress()
    rows = [["", "before, ms per step", "after", "ratio", "95 % on each side"]]
    for spec in chosen.specs:
        found[spec] = own = compare(chosen, spec, progress)
        times = [f"{own['before_ms']:.2f}", f"{own['after_ms']:.2f}"]
        bounds = "too few pairs" if own["low"] is None else f"{own['low']:.3f}..{own['high']:.3f}"
        rows.append([spec, *times, f"{own['ratio']:.3f}", bounds])
    progress.end()
    print(columns(rows))
    settings = {name: getattr(chosen, name) for name in ("layers", "hosts", "rate")}
    report.save(chosen, f"steps-{machine.slug(machine.cpu_name())}", {"settings": settings, "steps": found})
    return 0


def compare(chosen: argparse.Namespace, spec: str, tell: Callable[[str, float], object]) -> dict[str, Any]:
    """Time one spec's steps in both checkouts."""
    times: list[list[float]] = [[], []]
    with contextlib.ExitStack() as running:
        given = (spec, chosen.layers, chosen.hosts, chosen.rate)
        both = [running.enter_context(worker(each.resolve(), *given)) for each in (chosen.before, chosen.after)]
        for pair in range(chosen.pairs):
            for side in (0, 1) if pair % 2 else (1, 0):
                times[side].append(both[side](chosen.steps))
            tell(f"{spec}: pair {pair + 1} of {chosen.pairs}", (pair + 1) / chosen.pairs)
    ratios = [after / before for before, after in zip(*times, strict=True)]
    low, high = timing.median_bounds(ratios)
    found = {"ratio": statistics.median(ratios), "low": low, "high": high, "pairs": chosen.pairs, "steps": chosen.steps}
    return found | {"before_ms": 1000 * statistics.median(times[0]), "after_ms": 1000 * statistics.median(times[1])}
