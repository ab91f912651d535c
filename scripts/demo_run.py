"""The demo after its set-up: launches the dense and the compressed training with horovodrun, shows their progress, reports."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import demo_report
from demo_train import MARK

import gradcomp

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2


class Bar:
    """How far a training is: a bar on a terminal, else a line every few seconds."""

    def __init__(self, label: str, out: TextIO, every: float = 4.0):
        self.label, self.out, self.every = label, out, every
        self.in_place = out.isatty()
        self.began = self.said = time.monotonic()
        self.open = False

    def show(self, done: int, total: int, loss: str) -> None:
        now = time.monotonic()
        text = f"{self.label}  step {done:{len(str(total))}}/{total}  loss {loss}  {now - self.began:.0f} s"
        if self.in_place:
            full = 30 * done // total
            self.out.write(f"\r\033[K[{'#' * full}{'.' * (30 - full)}] {text}")
            self.open = True
        elif done == total or now - self.said >= self.every:
            self.said = now
            self.out.write(text + "\n")
        self.out.flush()

    def end(self) -> None:
        if self.open:
            self.out.write("\n")
            self.open = False


def follow(lines: Iterable[str], log: TextIO, bar: Bar) -> None:
    """Keeps all that the ranks say in the log, and shows what is meant for the bar."""
    for line in lines:
        _, mark, figures = line.partition(MARK)
        if mark:
            done, total, loss = figures.split()
            bar.show(int(done), int(total), loss)
        else:
            log.write(line)
            log.flush()
    bar.end()


def horovodrun() -> str:
    """The launcher that belongs to this very Python."""
    found = Path(sys.executable).parent / "horovodrun"
    if not found.exists():
        sys.exit(f"demo: {found.name} is not beside this Python ({sys.executable}): run scripts/setup, which builds Horovod")
    return str(found)


def run(label: str, spec: str, options: argparse.Namespace) -> dict[str, Any]:
    """One training; ends the demo with the end of its log if it fails."""
    result = options.out / f"{label}.json"
    result.unlink(missing_ok=True)
    own = ["--spec", spec, "--steps", str(options.steps), "--lr", str(options.lr), "--seed", str(options.seed)]
    script = ["scripts/demo_train.py", *own, "--width", str(options.width), "--result", str(result)]
    print(f"$ horovodrun -np {RANKS} python {shlex.join(script[:3])} ...", flush=True)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // RANKS))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    log_path = options.out / f"{label}.log"
    command = [horovodrun(), "-np", str(RANKS), sys.executable, *script]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with log_path.open("w") as log, subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        assert process.stdout is not None
        try:
            follow(process.stdout, log, Bar(f"{label:<10}", sys.stdout))
            status = process.wait()
        except BaseException:
            process.terminate()
            raise
    if status != 0 or not result.exists():
        tail = "".join(log_path.read_text().splitlines(keepends=True)[-15:])
        sys.exit(f"{tail}demo: the {label} training failed (horovodrun ended with {status}); all it said is in {log_path}")
    loaded: dict[str, Any] = json.loads(result.read_text())
    return loaded


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description="Trains on the digits with two ranks, dense and compressed."
    )
    parser.add_argument("--spec", default="topk:ratio=0.001", help="how the second training compresses (default %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="of each training (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.5, help="learning rate of both (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=2048, help="of the three hidden layers (default %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "demo-results", help="where the plot, figures and logs go")
    options = parser.parse_args()
    if options.steps < 1 or options.width < 1:
        parser.error("--steps and --width must be at least 1")
    try:
        gradcomp.make(options.spec)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> None:
    options = arguments()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"Handwritten digits, an MLP 64-{'-'.join([str(options.width)] * 3)}-10, {RANKS} ranks, {options.steps} steps each.")
    dense = run("dense", "dense", options)
    compressed = run("compressed", options.spec, options)
    print(f"\n{demo_report.table([dense, compressed])}\n")
    print(f"Plot: {demo_report.plot([dense, compressed], options.out / 'loss-against-bytes.png')}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
