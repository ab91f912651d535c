"""Trains a digit classifier on two ranks with four settings, over links of a set rate where possible, and compares them."""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import gradcomp
from gradcomp import doctor
from gradcomp.prediction.predict import predict
from laboratory import options as types
from laboratory import ranks
from laboratory.harness import measured
from laboratory.harness.ways import DDP, HOROVOD
from laboratory.machine import slug
from laboratory.options import folder, positive
from laboratory.ranks import RanksFailed
from laboratory.report import Progress, columns
from laboratory.tasks import digits
from laboratory.tasks.task import Settings
from laboratory.timing import smooth

# Ranks, and pictures of a rank in a step.
RANKS, BATCH = 2, 64
# Steps whose loss the progress, the table and a point of the curve average.
AVERAGED = 10
# The dense way, and torch's and Horovod's own to 16 bits, by door.
DENSE, HALF = "stock", {HOROVOD: "fp16", DDP: "bf16"}
NAMES = {HOROVOD: "Horovod", DDP: "DDP"}
Result = dict[str, Any]
HEADINGS = ("", "step time", "relative", "bytes sent per step", "compression", "test accuracy", "training loss")

EXPLANATION = f"""bytes sent per step: what one rank hands to the network
test accuracy: on images that no rank trained on
training loss: mean of the last {AVERAGED} steps over both ranks"""


def main(arguments: Sequence[str]) -> int:
    """Run the command line. Return the exit status."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for finding in doctor.host_name():
        if finding.advice:
            print(f"demo: host name {finding.text}: {finding.advice}", file=sys.stderr)
            return 1
    width = options.width
    print(f"Handwritten digits, an MLP 64-{width}-{width}-{width}-10, {RANKS} ranks, {options.steps} steps each.")
    lacking = None if options.rate == "none" else why_unshaped(options.rate)
    rate = "" if lacking or options.rate == "none" else options.rate
    print(f"The ranks are {f'two emulated hosts with links of {rate}' if rate else 'processes of this machine'}.", flush=True)
    if lacking:
        print(f"Links of {options.rate} are not emulated: {lacking}. Their step times are predicted.")
    try:
        trained = [train(way, rate, options) for way in (DENSE, *options.specs)]
    except RanksFailed as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    predicted = prediction(options) if lacking else []
    print(f"\n{table(trained, options, predicted)}\n\n{EXPLANATION}\n")
    for result in trained:
        if not result["weights_are_equal"]:
            print(f"{result['way']}: the ranks' weights DIFFER after the training")
    plot(trained, rate, options)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--ddp", action="store_true", help="train with DDP; Horovod need not be there")
    specs = "compared with dense, separated by semicolons (default: fp16, or bf16 with --ddp;blocks;topk)"
    parser.add_argument("--specs", metavar="SPECS", help=specs)
    rate = "of the ranks' links; none: unshaped (default: %(default)s)"
    parser.add_argument("--rate", type=types.rate, default="200mbit", help=rate)
    parser.add_argument("--steps", type=positive, default=100, help="steps of each training (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.5, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--width", type=positive, default=1024, help="width of the three hidden layers (default: %(default)s)")
    parser.add_argument("--out", type=folder, default="demo-results", metavar="FOLDER", help="for the plot and the logs")
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    options.door = DDP if options.ddp else HOROVOD
    half = HALF[options.door]
    if options.specs is None:
        options.specs = [half, "blocks", "topk"]
    else:
        try:
            options.specs = types.specs(options.specs, lambda spec: spec == half or gradcomp.make(spec))
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    return options


def why_unshaped(rate: str) -> str | None:
    """Say why links cannot be emulated here; None if they can."""
    tried = subprocess.run([*ranks.on_cluster(RANKS, rate, DDP), "true"], capture_output=True, text=True, errors="replace")
    if tried.returncode == 0:
        return None
    why = (tried.stderr.strip().splitlines() or ["it does not say why"])[-1].removeprefix("cluster: ")
    return why.partition("; run it as")[0]  # the command would be that of scripts/cluster


def train(way: str, rate: str, options: argparse.Namespace) -> Result:
    """Train once on real ranks. All their output but the progress goes to a log."""
    settings = Settings(options.lr, options.steps, momentum=0, batch=BATCH, width=options.width, clip=0)
    training = measured.Training("mlp", way, options.seed, RANKS, settings, options.door, rate=rate)
    log = options.out / f"{slug(way)}.log"
    result = {"way": way} | ranks.run(measured.command(training, options.out), ranks.environment(RANKS), way, log)
    if not log.stat().st_size:
        log.unlink()
    return result


def prediction(options: argparse.Namespace) -> list[str]:
    """Predict each way's step time on links of the rate, from a backward pass that is timed here."""
    model, progress = digits.model(options.seed, options.width), Progress()
    x, y = next(digits.batches(digits.load(), 0, RANKS, BATCH))
    passes, threads = [], torch.get_num_threads()
    # As a rank has them. More wait for one another where other programs run: a pass of 25 ms then took 500.
    torch.set_num_threads(int(ranks.environment(RANKS)["OMP_NUM_THREADS"]))
    for _ in range(5):
        began = time.perf_counter()
        loss = cross_entropy(model(x), y)
        between = time.perf_counter()
        loss.backward()
        passes.append((between - began, time.perf_counter() - between))
    forward, backward = map(statistics.median, zip(*passes, strict=True))
    half = HALF[options.door]
    own = [spec for spec in options.specs if spec != half]
    found = predict(model, RANKS, link=options.rate, forward_time=forward, backward_time=backward, specs=own, tell=progress)
    torch.set_num_threads(threads)
    progress.end()
    return [f"{1e3 * found[way].seconds:.0f} ms" for way in (DENSE, *options.specs)]


def table(trained: Sequence[Result], options: argparse.Namespace, predicted: Sequence[str]) -> str:
    """Write the table: a row for each training, the dense one first."""
    rows: list[tuple[str, ...]] = [HEADINGS]
    for result in trained:
        bytes_sent, loss = result["sent"][-1], statistics.mean(result["losses"][-AVERAGED:])
        ratios = (
            f"{step_of(result) / step_of(trained[0]):.2f}",
            f"{bytes_sent:,}",
            f"{4 * result['parameters'] / bytes_sent:.0f} x",
        )
        scores = f"{result['scores'][-1][2]:.1f} %", f"{loss:.4f}"
        rows.append((title(result, options.door), f"{1000 * step_of(result):.0f} ms", *ratios, *scores))
    if predicted:
        added = (f"at {options.rate}, predicted", *predicted)
        rows = [(*cells, more) for cells, more in zip(rows, added, strict=True)]
    return columns(rows)


def title(result: Result, door: str) -> str:
    """Name a training."""
    return f"{NAMES[door]}, dense" if result["way"] == DENSE else str(result["way"])


def step_of(result: Result) -> float:
    """Return the mean seconds of a step."""
    return float(result["seconds"]) / len(result["losses"])


def plot(results: Sequence[Result], rate: str, options: argparse.Namespace) -> None:
    """Draw the loss of each training against the bytes that a rank has sent so far, and against its steps' seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_bytes, by_seconds = figure.subplots(1, 2, sharey=True)
    for result in results:
        losses, name = smooth(result["losses"], AVERAGED), title(result, options.door)
        by_bytes.plot([*itertools.accumulate(each / 1e6 for each in result["sent"])], losses, label=name)
        by_seconds.plot([step_of(result) * (i + 1) for i in range(len(losses))], losses, label=name)
    by_bytes.set(xscale="log", yscale="log", xlabel="MB sent by a rank", ylabel=f"training loss (mean of {AVERAGED} steps)")
    by_bytes.xaxis.set_major_formatter("{x:g}")
    where = f"links of {rate}" if rate else "both ranks on this machine"
    by_seconds.set(xlabel=f"seconds, {where} (steps of mean time)")
    figure.suptitle(f"Digits, {RANKS} ranks, {options.steps} steps")
    for axes in (by_bytes, by_seconds):
        axes.grid(which="both", alpha=0.25)
        axes.legend()
    path = options.out / "loss.png"
    figure.savefig(path, dpi=100)
    print(f"plot: {path}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
