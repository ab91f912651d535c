"""The trainers' own packages, in an environment beside this one, and programs that run there on real ranks."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from gradcomp.integrations.common import TESTED

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "trainers"
# Kept out of the ranks: these programs find one another by torchrun.
OTHERS = ("HOROVOD_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_")


@functools.cache
def python() -> Path:
    """Make an environment that has the tested versions beside all packages of this one. Return its Python."""
    found = FOLDER / "bin" / "python"
    if not found.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (FOLDER / "lib" / version / "site-packages" / "outer.pth").write_text(sysconfig.get_path("purelib"))
    wanted = [f"{package}=={version}.*" for package, version in TESTED.items()]
    subprocess.run([found, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted], check=True)
    return found


def environment() -> dict[str, str]:
    """Return the variables under which torchrun starts that Python."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'helpers'}"}
    return inherited | offline | {"PYTHON_EXEC": str(python())}


def run(program: Path, ranks: int, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a program on so many ranks. Each saves what it found as FOLDER/found-RANK.pt; return that, in rank order."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
    command += [str(program), str(folder), *arguments]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    return [torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in range(ranks)]


def finish(folder: Path, found: dict[str, Any], version: str) -> None:
    """End a rank's program, once all ranks have come so far. version: of the package."""
    import torch.distributed as dist

    torch.save({**found, "version": version}, folder / f"found-{dist.get_rank()}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def take_cpus_for_gpus() -> None:
    """Let Accelerate take these ranks' CPUs, over gloo, for the GPUs on which alone it has FSDP2. All else is its own."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def net(width: int = 64) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, width), torch.nn.ReLU(), torch.nn.Linear(width, 5))


def data(size: int) -> torch.utils.data.TensorDataset:
    """Draw examples that are the same on all ranks."""
    x = torch.randn(size, 20, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x[:, :5].argmax(1))
