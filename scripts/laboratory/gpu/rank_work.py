"""The stages of gpu_check that run ranks of Horovod and DDP on one GPU, and compare them bit for bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from laboratory import ranks
from laboratory.gpu import horovod_build
from laboratory.gpu.gpu import Gpu
from laboratory.gpu.place import BUILD, HOROVOD, HOROVOD_NCCL, environment
from laboratory.gpu.stages import Clock, Failed, Record
from laboratory.gpu.work import marked


def horovod(clock: Clock, gpu: Gpu | None) -> Record:
    """Find Horovod as it is published, or build it from the downloads of --prepare."""
    try:
        return {"built_here": False, **built_with(clock)}
    except Failed:
        horovod_build.build(clock, gpu, HOROVOD)
        return {"built_here": True, **built_with(clock)}


def built_with(clock: Clock, **variables: str) -> Record:
    """Return how the imported Horovod was built."""
    ask = 'import json, horovod.torch as h; print("@" + json.dumps({"gloo": h.gloo_built(), "nccl": bool(h.nccl_built())}))'
    return marked(clock.command([sys.executable, "-c", ask], cwd=BUILD, **variables))


def horovod_ranks(clock: Clock, device: str, width: str, count: int = 2, **variables: str) -> Record:
    """Run ranks of stock Horovod with their tensors on this device."""
    job = ["laboratory.gpu.horovod_job", "--device", device, "--width", width]
    return compared(clock, ranks.command("horovodrun", count, job), **variables)


def ddp(clock: Clock, device: str, width: str, backend: str, count: int) -> Record:
    """Run ranks of DDP with their tensors on this device."""
    job = ["laboratory.gpu.ddp_job", "--device", device, "--backend", backend, "--width", width]
    return compared(clock, ranks.command("torchrun", count, job))


def compared(clock: Clock, words: Sequence[str | Path], **variables: str) -> Record:
    """Run a job of several ranks, and return its result. All its comparisons must hold."""
    text = clock.command(words, cwd=BUILD, CUBLAS_WORKSPACE_CONFIG=":4096:8", OMP_NUM_THREADS="1", **variables)
    found = marked(text, ranks.RESULT)
    wrong = [name for name, holds in found["checks"].items() if not holds]
    if wrong:
        raise Failed(f"these comparisons do not hold: {'; '.join(wrong)}; {json.dumps(found)}")
    return found


def nccl(clock: Clock, gpu: Gpu, width: str) -> Record:
    """Build Horovod with NCCL, and run one rank of it: NCCL takes no two ranks on one GPU."""
    horovod_build.build(clock, gpu, HOROVOD_NCCL, horovod_build.nccl_variables(BUILD / "nccl"))
    first = {"PYTHONPATH": environment(HOROVOD_NCCL)["PYTHONPATH"]}
    found = built_with(clock, **first)
    if not found["nccl"]:
        raise Failed("Horovod was built, but without NCCL; the stage's log says what its build found")
    return {**found, **horovod_ranks(clock, "cuda", width, 1, **first)}
