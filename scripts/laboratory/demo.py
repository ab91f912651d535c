"""The demo after its set-up: trains dense and compressed on two ranks, shows the progress, and compares the two."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradcomp
from gradcomp import doctor
from laboratory import ranks
from laboratory.harness import measured
from laboratory.options import folder, positive
from laboratory.ranks import RanksFailed
from laboratory.report import columns
from laboratory.stats import smooth
from laboratory.tasks.task import Settings

# Ranks, and pictures of a rank in a step.
RANKS, BATCH = 2, 64
# Steps whose loss the progress, the table and a point of the curve average.
AVERAGED = 10
Result = dict[str, Any]
HEADINGS = ("", "step time (mean)", "bytes sent per step", "compression", "test accuracy", "training loss")

EXPLANATION = f"""bytes sent per step: what one rank hands to the network
test accuracy: on pictures that no rank trained on
training loss: mean of the last {AVERAGED} steps over both ranks; unsent entries wait for later steps, so a short compressed
training ends behind a dense one"""


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
    try:
        trained = [train("dense", "stock", options), train("compressed", options.spec, options)]
    except RanksFailed as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print(f"\n{columns([HEADINGS, *map(row, trained)])}\n\n{EXPLANATION}\n")
    for result in trained:
        if not result["weights_are_equal"]:
            print(f"{result['way']}: the ranks' weights DIFFER after the training")
    plot(trained, options.out / "loss.png")
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--spec", default="topk", help="spec of the compressed training (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=120, help="steps of each training (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.5, help="learning rate of both (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--width", type=positive, default=2048, help="width of the three hidden layers (default: %(default)s)")
    parser.add_argument("--out", type=folder, default="demo-results", metavar="FOLDER", help="for the plot and the logs")
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    try:
        gradcomp.make(options.spec)
    except ValueError as error:
        parser.error(str(error))
    return options


def train(label: str, way: str, options: argparse.Namespace) -> Result:
    """Train once on real ranks. All their output but the progress goes to a log."""
    settings = Settings(options.lr, options.steps, momentum=0, batch=BATCH, width=options.width, clip=0)
    training = measured.Training("mlp", way, options.seed, RANKS, settings, door="horovod")
    print(f"$ horovodrun -np {RANKS} python -m laboratory.harness.rank ...  ({way})", flush=True)
    words = measured.command(training, options.out)
    log = options.out / f"{label}.log"
    result = {"way": way} | ranks.run(words, ranks.environment(RANKS), label, log)
    if not log.stat().st_size:
        log.unlink()
    return result


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw the loss of each training against the bytes that a rank has sent so far, and against its steps' seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_bytes, by_seconds = figure.subplots(1, 2, sharey=True)
    for result in results:
        losses, step = smooth(result["losses"], AVERAGED), result["seconds"] / len(result["losses"])
        by_bytes.plot([*itertools.accumulate(each / 1e6 for each in result["sent"])], losses, label=_title(result))
        by_seconds.plot([step * (i + 1) for i in range(len(losses))], losses, label=_title(result))
    by_bytes.set(xscale="log", yscale="log", xlabel="MB sent by a rank", ylabel=f"training loss (mean of {AVERAGED} steps)")
    by_bytes.xaxis.set_major_formatter("{x:g}")
    by_seconds.set(xlabel="seconds, both ranks on this machine (steps of mean time)")
    figure.suptitle(f"Digits, {RANKS} ranks, {len(results[0]['losses'])} steps")
    for axes in (by_bytes, by_seconds):
        axes.grid(which="both", alpha=0.25)
        axes.legend()
    figure.savefig(path, dpi=100)
    print(f"drawn: {path}")


def _title(result: Result) -> str:
    return "Horovod, dense" if result["way"] == "stock" else str(result["way"])


def row(result: Result) -> tuple[str, ...]:
    """Make a training's row of the table."""
    return (
        _title(result),
        f"{1000 * result['seconds'] / len(result['losses']):.0f} ms",
        f"{result['sent'][-1]:,}",
        f"{4 * result['parameters'] / result['sent'][-1]:.0f} x",
        f"{result['scores'][-1][2]:.1f} %",
        f"{statistics.mean(result['losses'][-AVERAGED:]):.4f}",
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
