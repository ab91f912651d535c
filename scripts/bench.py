#!/usr/bin/env python3
"""Measures gradcomp: kernels against plain torch, what they need of a GPU, and on an emulated cluster training and traffic."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch
from benchlib import (
    kernel_cases,
    kernel_report,
    machine,
    options,
    predict,
    ranks,
    report,
    resources,
    rounds,
    traffic_report,
    train,
)

EXAMPLES = """\
examples:
  scripts/bench.py kernels --size 16.8M --threads 1
  scripts/bench.py kernels --device cuda --size 64M --json kernels.json
  scripts/bench.py resources --arch sm_90
  scripts/bench.py train --hosts 4 --rate 1gbit,100mbit --specs none,horovod,fp16,dense,topk:ratio=0.001
  scripts/bench.py traffic --hosts 2,4,8 --specs dense,topk:ratio=0.001,gtopk:ratio=0.001

Results are written to benchmarks/results/ unless --json names another file. Times are medians over interleaved rounds."""

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
"""Whose traffic is measured; any other spec is counted and measured without more ado."""


def kernels(chosen: argparse.Namespace) -> int:
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench.py: --device cuda: torch finds no GPU here", file=sys.stderr)
        return 2
    torch.set_num_threads(chosen.threads)
    cases = kernel_cases.Bench(chosen.size, device, chosen.layers).cases()
    progress = report.Progress()
    seconds = rounds.interleave(
        cases, chosen.rounds, rounds.clock(device), lambda done: progress(f"round {done} of {chosen.rounds}")
    )
    progress.end()
    found = kernel_report.lines(cases, seconds)
    settings = {"device": chosen.device, "size": chosen.size, "layers": chosen.layers, "rounds": chosen.rounds}
    if device.type == "cpu":
        settings["threads"] = chosen.threads
    result = {"what": "kernels", **machine.origin(chosen.written), "settings": settings, "lines": found}
    if device.type == "cuda":
        result["machine"] |= machine.describe_gpu()
        result["versions"] |= {"cuda": torch.version.cuda, **machine.versions(("cupy-cuda13x", "cupy-cuda12x"))}
        result["targets"] = kernel_report.gpu_targets(found)
    else:
        result["targets"] = kernel_report.targets(found)
    name = machine.slug(result["machine"].get("gpu", result["machine"]["cpu"]))
    print(f"{chosen.size:,} entries in {chosen.layers} layer(s), k = 0.1 %, {settings}\n")
    print(kernel_report.table(found))
    print("\n".join(map(kernel_report.sentence, result["targets"])))
    return save(result, chosen.json or results() / f"kernels-{chosen.device}-{name}.json")


def resources_used(chosen: argparse.Namespace) -> int:
    try:
        uses = resources.measure(chosen.arch)
    except RuntimeError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    print(f"{resources.table(uses)}\n\n{len(uses)} kernels, {chosen.arch}")
    beyond = resources.exceeded(uses)
    print("\n".join(beyond) or "none needs more than it is allowed")
    settings = {"arch": chosen.arch, "nvcc": resources.version()}
    result = {"what": "resources", **machine.origin(chosen.written), "settings": settings, "lines": resources.lines(uses)}
    return save(result, chosen.json or results() / f"resources-{chosen.arch}.json") or bool(beyond)


def predicted(chosen: argparse.Namespace) -> int:
    checks = [json.loads(path.read_text()) for path in sorted(results().glob("gpu-*.json"))]
    found = predict.measured(checks, chosen.size, predict.H200)
    path = chosen.out or results().parent / "gpu.md"
    path.write_text(predict.page(chosen.size, predict.H200, found))
    print(f"{predict.table(chosen.size, predict.H200, found)}\n\nwritten: {path}")
    return 0


def training(chosen: argparse.Namespace) -> int:
    runs = []
    for rate in chosen.rate if chosen.launcher == "cluster" else ["loopback"]:
        launch = train.Launch(
            chosen.launcher, chosen.hosts, rate, chosen.width, chosen.specs, rounds=chosen.rounds, steps=chosen.steps
        )
        run = train.perform(launch, rate)
        runs.append({"rate": rate, **run})
        print(f"\n{run['ranks']} ranks, {rate}\n\n{train.table(run)}\n", flush=True)
    settings = {"launcher": chosen.launcher, "hosts": chosen.hosts, "rounds": chosen.rounds, "steps": chosen.steps}
    result = {"what": "train", **machine.origin(chosen.written), "settings": settings, "runs": runs}
    return save(result, chosen.json or results() / f"train-{machine.slug(machine.cpu_name())}.json")


def traffic(chosen: argparse.Namespace) -> int:
    runs = []
    for hosts in chosen.hosts:
        run = traffic_report.launch(chosen, hosts)
        runs.append(run)
        idle = f"an idle rank sends {run['idle_bytes_per_cycle']:,} bytes a cycle of Horovod's"
        print(f"\n{hosts} ranks, {chosen.size:,} entries, bytes a step; {idle}\n\n{traffic_report.table(run)}\n", flush=True)
    progress = report.Progress()
    simulated = traffic_report.curves(chosen, progress)
    progress.end()
    settings = {"hosts": chosen.hosts, "size": chosen.size, "steps": chosen.steps, "ranks": chosen.ranks}
    result = {"what": "traffic", **machine.origin(chosen.written), "settings": settings, "runs": runs, "simulated": simulated}
    picture = chosen.json.with_suffix(".png") if chosen.json else results() / "traffic.png"
    traffic_report.draw(chosen.size, runs, simulated, picture)
    print(f"drawn: {picture}")
    return save(result, chosen.json or results() / f"traffic-{machine.slug(machine.cpu_name())}.json")


def results() -> Path:
    return machine.ROOT / "benchmarks" / "results"


def save(result: dict[str, object], path: Path) -> int:
    report.write_json(path, result)
    print(f"\nwritten: {path}")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/bench.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = made.add_subparsers(required=True, metavar="kernels|resources|predict|train|traffic")
    one = kinds.add_parser("kernels", help="every kernel against copy_, add_ and plain torch", allow_abbrev=False)
    one.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    one.add_argument("--size", type=options.size, default=16_800_000, help="entries (default 16.8M)")
    one.add_argument("--layers", type=options.positive, default=1, help="that the entries are cut into (default 1)")
    one.add_argument("--threads", type=options.positive, default=1, help="on a CPU (default 1)")
    one.add_argument("--rounds", type=options.positive, default=15, help="(default 15)")
    one.set_defaults(run=kernels)
    nvcc = kinds.add_parser("resources", help="registers and memory of every CUDA kernel, without a GPU", allow_abbrev=False)
    nvcc.add_argument("--arch", type=options.arch, default="sm_90", help="that nvcc compiles for (default sm_90)")
    nvcc.set_defaults(run=resources_used)
    page = kinds.add_parser("predict", help="what kernels should take on an H200, beside what they took", allow_abbrev=False)
    page.add_argument("--size", type=options.size, default=64_000_000, help="entries (default 64M)")
    page.add_argument("--out", type=Path, metavar="FILE", help="where the page goes (default benchmarks/gpu.md)")
    page.set_defaults(run=predicted)
    two = kinds.add_parser("train", help="the digits job on an emulated cluster", allow_abbrev=False)
    two.add_argument("--hosts", type=options.positive, default=4, help="one rank each (default 4)")
    two.add_argument("--rate", type=options.rates, default=["1gbit", "100mbit"], help="of the links (default 1gbit,100mbit)")
    own = "; ".join(f"{name}: {what}" for name, what in options.BUILT_IN.items())
    two.add_argument(
        "--specs",
        type=options.specs,
        default=["none", "sync", "horovod", "fp16", "dense", "topk:ratio=0.001", "sdagc:density=0.001,small=pool"],
        help=f"what is compared, specs of gradcomp or: {own}",
    )
    two.add_argument("--rounds", type=options.positive, default=3, help="(default 3)")
    two.add_argument("--steps", type=options.positive, default=12, help="of each spec in a round (default 12)")
    two.add_argument("--width", type=options.positive, default=2048, help="of the job's hidden layers (default 2048)")
    two.add_argument(
        "--launcher",
        choices=("cluster", "horovodrun"),
        default="cluster",
        help="horovodrun: ranks on this machine alone, without root and without shaped links",
    )
    two.set_defaults(run=training)
    three = kinds.add_parser("traffic", help="what ranks send, against the formula", allow_abbrev=False)
    three.add_argument("--hosts", type=options.hosts, default=[2, 4, 8], help="of each cluster, one rank each (default 2,4,8)")
    three.add_argument("--size", type=options.size, default=500_000, help="entries of the model (default 500k)")
    three.add_argument("--steps", type=options.positive, default=20, help="(default 20)")
    three.add_argument("--ranks", type=options.positive, default=1024, help="that are simulated, at most (default 1024)")
    three.add_argument("--specs", type=options.own_specs, default=SPECS, help="what is measured, specs of gradcomp")
    three.set_defaults(run=traffic)
    for each in (one, nvcc, two, three):
        each.add_argument("--json", type=Path, metavar="FILE", help="where the result goes")
    return made


def main(arguments: list[str]) -> int:
    chosen = parser().parse_args(arguments)
    chosen.written = shlex.join(["scripts/bench.py", *without_paths(arguments)])
    try:
        return int(chosen.run(chosen))
    except ranks.RanksFailed as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 1


def without_paths(arguments: list[str]) -> list[str]:
    """The command as the result file has it: where the file went is nobody's business."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument.startswith("--json="):
            skip = False
        elif argument == "--json":
            skip = True
        else:
            kept.append(argument)
    return kept


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
