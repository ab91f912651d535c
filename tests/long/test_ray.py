"""Ray Train runs the example on two workers of one machine: one is killed, and the end is that of a training without a death.

Ray's processes live in namespaces of their own. They listen on the loopback alone, and end with the test.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from laboratory.cluster import guard, network
from laboratory.loops import by_ray

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE, TIMEOUT = ROOT / "examples" / "ray_train.py", 280


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="Ray Train was NOT tested: it needs root")
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray Train was NOT tested: pip install 'ray[train]' installs it")
def test_a_training_with_a_killed_worker_ends_as_one_without() -> None:
    with tempfile.TemporaryDirectory(prefix="gradcomp-ray.") as name:
        said = {dies_at: run(Path(name, str(dies_at)), dies_at) for dies_at in (0, 55)}
        assert "goes on after" not in said[0] and re.search(r"rank 1 goes on after step [45]0\b", said[55]), said[55]
        whole, broken = (last(Path(name, str(dies_at))) for dies_at in said)
        ends = [ast.literal_eval(re.findall(r"^ends with (.+)$", text, re.MULTILINE)[0]) for text in said.values()]
    assert ends[0] == ends[1] and ends[0]["step"] == 100 and ends[0]["loss"] < 0.8 and ends[0]["compression"] > 20
    for own, other in zip(whole, broken, strict=True):
        assert own["gradcomp"]["ranks"] == 2
        for layer, weights in own["model"].items():
            assert torch.equal(weights, whole[0]["model"][layer]), "the ranks' weights differ"
            assert torch.equal(weights, other["model"][layer]), "the resumed training ends elsewhere"


def run(storage: Path, dies_at: int) -> str:
    """Run the example. Return its output."""
    own = {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "HOME": str(storage.parent), "OMP_NUM_THREADS": "1"}
    own |= by_ray.SETTINGS
    command: Any = [sys.executable, __file__, "--storage", storage, "--dies-at", str(dies_at)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env={**os.environ, **own})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def last(storage: Path) -> list[dict[str, Any]]:
    """Load the last checkpoint of all workers."""
    folder = sorted(storage.glob("*/checkpoint_2*"))[-1]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def inside() -> int:
    """Run the example on a loopback of its own."""
    network.leave()
    return subprocess.run([sys.executable, EXAMPLE, *sys.argv[1:]], stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.dont_write_bytecode = True  # root leaves no files in the checkout
    sys.exit(guard.supervise(inside))
