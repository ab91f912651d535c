"""torchrun starts a DDP training again, with as many ranks or with others: updates and what waits are the gradients."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from restarted_worker import EVERY, gradients
from torch import Tensor

pytestmark = pytest.mark.long

MOMENTUM = 0.5
SPECS = ["topk:ratio=0.05", f"sign:momentum={MOMENTUM}", "sdagc:lam=1.5", "gtopk:ratio=0.05,warmup=40"]
# Ranks, and the step at which a launch ends. In the first one a rank ends itself in the step after.
LAUNCHES = [(4, 20), (3, 35), (4, 50)]
KILLED_IN = 13


def run(count: int, *given: str) -> None:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    options = [
        "--max-restarts",
        "1",
        "--nproc-per-node",
        str(count),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    program = [torchrun, *options, "-m", "restarted_worker", *given]
    # Otherwise torch's own store keeps the dead ranks' addresses, and gloo's restarted ranks call those.
    environment = ranks._environment("") | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    running = subprocess.Popen(
        program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = running.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        said, _ = running.communicate()
    assert running.returncode == 0, said


@functools.cache
def trained(spec: str) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Train in three launches. Return where each began and ended, and the last states."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i, (count, last) in enumerate(LAUNCHES):
            run(count, name, spec, str(last), *([str(KILLED_IN)] if i == 0 else []))
        began = [json.loads(line) for line in (folder / "began").read_text().splitlines()]
        final = folder / f"step-{LAUNCHES[-1][1]:08}"
        return began, [torch.load(file, weights_only=True) for file in sorted(final.glob("*.pt"))]


def flat(parts: Any) -> Tensor:
    return torch.cat([part.double().flatten() for part in parts])


@pytest.mark.parametrize("spec", SPECS)
def test_every_launch_goes_on_from_the_last_checkpoint(spec: str) -> None:
    began, _ = trained(spec)
    assert began == [[4, KILLED_IN // EVERY * EVERY, 20], [3, 20, 35], [4, 35, 50]]


@pytest.mark.parametrize("spec", SPECS)
def test_updates_and_what_waits_are_all_gradients(spec: str) -> None:
    """Every rank's state is loaded, so nothing is lost. Rounding: sums of some hundred float32 gradients."""
    _, states = trained(spec)
    bounds = [0, *(last for _, last in LAUNCHES)]
    wanted, waits = torch.zeros(1230, dtype=torch.float64), torch.zeros(1230, dtype=torch.float64)
    for (count, last), first in zip(LAUNCHES, bounds, strict=False):
        for step in range(first, last):
            wanted += sum(flat(gradients(rank, step, count)) for rank in range(count)) / count
    for rank, state in enumerate(states):
        layers = state["handle"]["of_rank"][str(rank)]["layers"]
        waits += flat(layers["feedback"]["residual"][name] for name in "ab") / len(states)
        if layers.get("sgd"):
            waits += flat(layers["sgd"]["velocity"][name] for name in "ab") / len(states) * MOMENTUM / (1 - MOMENTUM)
    weight = 1 / (1 - MOMENTUM) if "momentum" in spec else 1.0
    came = -flat(states[0]["model"].values())  # of a, then b
    assert waits.norm() > 1, "something waits"
    torch.testing.assert_close(came + waits, weight * wanted, rtol=1e-3, atol=2e-3)
