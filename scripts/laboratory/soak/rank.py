"""A rank of a soak, whatever carries its gradients: its log, its sum of given gradients, and its records at commits."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laboratory.soak.plan import ENTRIES, SPIKED, Net, Plan, counted, flat

# The file in the folder that ends the training.
STOP = "stop"
# Records and states of a rank that others may still go back to.
KEPT = 2


class Rank:
    """This process's part in a soak.

    folder: of logs and records. given: what this process has given so far, over the number of ranks in each step.
    """

    def __init__(self, folder: Path, plan: Plan):
        self.folder, self.plan, self.model = folder, plan, Net()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=plan.growth)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1.0)
        self.given = torch.zeros(ENTRIES, dtype=torch.float64)
        self._commits: dict[int, Tensor] = {}
        self._records: list[Path] = []
        self._steps: list[tuple[float, float]] = []
        self._log = (folder / f"log-{os.getpid()}.jsonl").open("a", buffering=1)

    def go_on(self, step: int, ranks: int) -> None:
        """Go on after a step with so many ranks, at the start, or after others have left or joined."""
        self.given = self._commits.get(step, torch.zeros(ENTRIES, dtype=torch.float64)).clone()
        self._steps.clear()
        self.say({"begins": step, "ranks": ranks, "host": os.environ.get("HOROVOD_HOSTNAME")})

    def begin_step(self) -> None:
        """Start the clocks of a step."""
        self._began = time.perf_counter(), time.process_time()

    def end_step(self, drawn: Tensor, ranks: int) -> None:
        """Stop the clocks, and count what was given."""
        wall, cpu = self._began
        self._steps.append((time.perf_counter() - wall, time.process_time() - cpu))
        self.given.add_(counted(drawn), alpha=1 / ranks)

    def keep(self, step: int, rank: int, ranks: int, residual: dict[str, Tensor], **more: Any) -> dict[str, Any]:
        """Write what a judge needs of this rank if the training goes on, or ends, after this step. Return it."""
        waits = flat(list(residual.values()))
        record: dict[str, Any] = {"step": step, "rank": rank, "ranks": ranks, "pid": os.getpid(), "given": self.given.clone()}
        record |= {"residual": waits, "weights": flat(list(self.model.parameters())), **more}
        self._commits[step] = record["given"]
        path = self.folder / f"record-{os.getpid()}-{step:08}.pt"
        torch.save(record, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        if path not in self._records:
            self._records.append(path)
        while len(self._records) > KEPT:
            self._records.pop(0).unlink(missing_ok=True)
            del self._commits[min(self._commits)]
        return record

    def log(self, record: dict[str, Any], spec: str) -> None:
        """Write a line of figures, with the medians of the steps since the last line."""
        waits = record["residual"].clone()
        waits[SPIKED] = 0
        walls, cpus = zip(*self._steps, strict=True)
        line = {"step": record["step"], "rank": record["rank"], "ranks": record["ranks"], "spec": spec, **resources()}
        line |= {"wall_ms": 1000 * statistics.median(walls), "cpu_ms": 1000 * statistics.median(cpus)}
        self.say({**line, "residual": float(waits.norm()), "scale": self.scaler.get_scale()})
        self._steps.clear()

    def say(self, line: dict[str, Any]) -> None:
        """Write a line to the log."""
        self._log.write(json.dumps({"time": time.monotonic(), "pid": os.getpid(), **line}) + "\n")

    def is_to_stop(self) -> bool:
        """Decide whether the driver has asked for the end. For rank 0 alone: others may see the file a step later."""
        return (self.folder / STOP).exists()


def resources() -> dict[str, int]:
    """Return this process's memory in kB, its open files and its threads."""
    status = Path("/proc/self/status").read_text()
    fields = {"rss_kb": "VmRSS", "peak_kb": "VmHWM", "threads": "Threads"}
    found = {name: int(re.findall(rf"^{field}:\s*(\d+)", status, re.MULTILINE)[0]) for name, field in fields.items()}
    return {**found, "fds": len([*Path("/proc/self/fd").iterdir()]) - 1}  # without that of the listing


def options() -> argparse.Namespace:
    """Read a job's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    return parser.parse_args()
