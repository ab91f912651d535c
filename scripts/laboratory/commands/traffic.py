"""Count the bytes that ranks send: by the interface of emulated hosts, by formula, and for up to 1,024 simulated ranks."""

from __future__ import annotations

import argparse

from laboratory import machine, options
from laboratory.report import results
from laboratory.report.progress import Progress
from laboratory.traffic import summary
from laboratory.traffic.plot import draw

SPECS = [
    "dense",
    "topk:ratio=0.001",
    "topk:ratio=0.001,wire=exact",
    "topk:ratio=0.001,route=split",
    "topk:ratio=0.001,route=tree",
    "topk:ratio=0.001,by_host=true",
    "sdagc:density=0.001,small=pool",
    "gtopk:ratio=0.001",
    "sketched_sgd:ratio=0.001",
    "gs_sgd:ratio=0.001,sum=allreduce",
    "gs_sgd:ratio=0.001,sum=tree",
]

EXAMPLES = """\
example:
  scripts/lab traffic --hosts 2,4 --specs dense,topk:ratio=0.001,gtopk:ratio=0.001

It needs root for the emulated clusters, and up to 5 GB of memory for the simulated ranks."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--hosts", type=options.hosts, default="2,4,8", help="hosts of each cluster, with one rank each (default: 2,4,8)"
    )
    parser.add_argument("--size", type=options.size, default="500k", help="entries of the model (default: 500k)")
    parser.add_argument("--steps", type=options.positive, default=20, help="steps that are counted (default: 20)")
    parser.add_argument("--ranks", type=options.positive, default=1024, help="simulated ranks, at most (default: 1024)")
    parser.add_argument("--specs", type=options.specs, default=SPECS, help=f"(default: {';'.join(SPECS)})")
    options.add_places(parser, "the CPU's model")


def run(chosen: argparse.Namespace) -> int:
    """Launch the clusters, simulate many ranks, and write tables, picture and result file."""
    runs = []
    for hosts in chosen.hosts:
        run = summary.launch(chosen, hosts)
        runs.append(run)
        idle = f"an idle rank sends {run['idle_bytes_per_cycle']:,} bytes in a cycle of Horovod"
        print(f"\n{hosts} ranks, {chosen.size:,} entries, bytes a step; {idle}\n\n{summary.table(run)}\n", flush=True)
    progress = Progress()
    simulated = summary.curves(chosen, progress)
    progress.end()
    name = machine.slug(machine.cpu_name())
    draw(chosen.size, runs, simulated, results.path_of(chosen, name, ".png"))
    settings = {"hosts": chosen.hosts, "size": chosen.size, "steps": chosen.steps, "ranks": chosen.ranks}
    results.save(chosen, results.path_of(chosen, name), {"settings": settings, "runs": runs, "simulated": simulated})
    return 0
