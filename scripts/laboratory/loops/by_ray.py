"""The cells of a table of loops on the workers of Ray Train, which is started for them and listens on the loopback alone."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laboratory.cluster import guard, network
from laboratory.machine import ROOT

# Ray sends no figures to its makers, makes no token in HOME, and lets its workers be as fast as other processes.
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}


def launch(count: int, cells: Sequence[Any], text: str, seconds: float) -> list[Any]:
    """Train cells on so many workers of one job; return what they return. Raise AssertionError where one reports nothing."""
    paths = [ROOT, ROOT / "scripts", ROOT / "tests" / "helpers", *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="gradcomp-ray.") as folder:
        own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HOME": folder, "GRADCOMP_TEST_REPORTS": folder}
        Path(folder, "order").write_bytes(pickle.dumps((count, list(cells), text)))
        command = [sys.executable, "-m", "laboratory.loops.by_ray"]
        output = Path(folder, "output")
        with output.open("w") as file:
            options: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            running = subprocess.Popen(command, env={**os.environ, **SETTINGS, **own}, **options)
            try:
                running.wait(seconds)
            except subprocess.TimeoutExpired:
                running.terminate()
                running.wait()
        files = [Path(folder, f"{rank}.pickle") for rank in range(count)]
        if not all(each.exists() for each in files):
            raise AssertionError(f"Ray's workers reported nothing: {output.read_text()[-3000:]}")
        return [pickle.loads(each.read_bytes()) for each in files]


def inside() -> int:
    """Start Ray, and train the ordered cells on its workers. They write their reports."""
    network.leave()
    import ray.train
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder = os.environ["GRADCOMP_TEST_REPORTS"]
    count, cells, text = pickle.loads(Path(folder, "order").read_bytes())

    def worker() -> None:
        import rank_server  # type: ignore[import-not-found] # of tests/helpers

        from laboratory.loops.launches import play

        rank = ray.train.get_context().get_world_rank()
        os.environ |= {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(count)}
        rank_server.report(play(cells, text))

    ray.init(num_cpus=count, include_dashboard=False, _temp_dir=f"{folder}/ray")
    trainer = TorchTrainer(
        worker,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=count),
        run_config=RunConfig(storage_path=f"{folder}/storage"),
    )
    trainer.fit()  # fails where workers have ended themselves after a refusal, which their reports hold
    return 0


if __name__ == "__main__":
    sys.exit(guard.supervise(inside))
