"""Time the steps of a training job on real ranks, under each way to exchange gradients."""

from __future__ import annotations

import argparse

from laboratory import machine, options
from laboratory.report import results
from laboratory.train.launch import Launch, perform, table

SPECS = "none,sync,horovod,fp16,dense,topk:ratio=0.001,sdagc:density=0.001,small=pool"

EXAMPLES = """\
examples:
  scripts/lab train --hosts 4 --rate 1gbit,100mbit --specs none,horovod,fp16,dense,topk:ratio=0.001
  scripts/lab train --launcher horovodrun --hosts 2 --width 256     # without root, links as they are

Times are medians over rounds in which all specs take turns."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--hosts", type=options.positive, default=4, help="emulated hosts, with one rank each (default: 4)")
    parser.add_argument(
        "--rate", type=options.rates, default="1gbit,100mbit", help="rates of the emulated links (default: 1gbit,100mbit)"
    )
    built_in = "; ".join(f"{name}: {meaning}" for name, meaning in options.BUILT_IN.items())
    parser.add_argument("--specs", type=options.any_specs, default=SPECS, help=f"specs of gradcomp, or {built_in}")
    parser.add_argument(
        "--rounds", type=options.positive, default=3, help="rounds in which each spec takes a turn (default: 3)"
    )
    parser.add_argument("--steps", type=options.positive, default=12, help="steps of each spec in a round (default: 12)")
    parser.add_argument("--width", type=options.positive, default=2048, help="width of the hidden layers (default: 2048)")
    options.add_launcher(parser)
    options.add_places(parser, "the CPU's model")


def run(chosen: argparse.Namespace) -> int:
    """Launch the ranks at each rate, and write the tables."""
    runs = []
    for rate in chosen.rate if chosen.launcher == "cluster" else ["loopback"]:
        launch = Launch(chosen.launcher, chosen.hosts, rate, chosen.width, chosen.specs, chosen.rounds, chosen.steps)
        run = perform(launch, rate)
        runs.append({"rate": rate, **run})
        print(f"\n{run['ranks']} ranks, {rate}\n\n{table(run)}\n", flush=True)
    settings = {"launcher": chosen.launcher, "hosts": chosen.hosts, "rounds": chosen.rounds, "steps": chosen.steps}
    path = results.path_of(chosen, machine.slug(machine.cpu_name()))
    results.save(chosen, path, {"settings": settings, "runs": runs})
    return 0
