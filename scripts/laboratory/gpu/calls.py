"""The three calls of gpu_check, and their stages, the most telling ones first."""

from __future__ import annotations

from functools import partial

from laboratory.gpu import tool_work, work
from laboratory.gpu.place import Gpu
from laboratory.gpu.stages import Stage

CALLS = {"kernels": "build, tests, times", "ranks": "DDP, Horovod, NCCL", "tools": "compute-sanitizer, ncu"}

# Seconds of all stages of a call. With its start and end it then takes less than nine minutes.
TOTAL = 520.0

# Tests of whole steps, of kernels and of laws, as work.tests() wants them; and fewer for a dry run.
WANTED = ("tests/test_cuda.py",), ("tests/kernels",), ("tests/test_laws.py",)
WANTED_DRY = (
    ("tests/native/test_streams.py",),
    ("tests/kernels/test_delivery.py",),
    ("tests/test_laws.py", "test_conservation", "dense"),
)
TOOLS = {"memcheck": 110.0, "racecheck": 110.0, "synccheck": 90.0}
PARTS = ("passes", "sparse", "above", "sketches", "levels")


def stages(call: str, gpu: Gpu | None) -> list[Stage]:
    """Return the stages of a call for this GPU; without one those of a dry run on the CPU, smaller."""
    device = "cuda" if gpu else "cpu"
    return [
        Stage("machine", partial(work.machine, device=device), 60, required=True),
        Stage("build", partial(work.build, device=device, gpu=gpu), 180, required=True),
        *{"kernels": kernels, "ranks": ranks, "tools": tools}[call](gpu, device),
    ]


def kernels(gpu: Gpu | None, device: str) -> list[Stage]:
    """Return the stages that test and measure kernels."""
    size, large, rounds = ("64M", "256M", 30) if gpu else ("100k", "200k", 2)
    first, of_kernels, of_laws = WANTED if gpu else WANTED_DRY
    return [
        Stage("steps", partial(work.tests, device=device, wanted=first), 80),
        Stage("kernels", partial(work.kernels, device=device, size=size, rounds=rounds), 90),
        Stage("tests", partial(work.tests, device=device, wanted=of_kernels, most_workers=8), 150),
        Stage("kernels-large", partial(work.kernels, device=device, size=large, rounds=max(2, rounds // 3)), 90),
        Stage("laws", partial(work.tests, device=device, wanted=of_laws, most_workers=8), 120),
    ]


def ranks(gpu: Gpu | None, device: str) -> list[Stage]:
    """Return the stages of two ranks that share the device, over NCCL on a GPU."""
    width, backend = ("2048", "nccl") if gpu else ("64", "gloo")
    job = ["laboratory.gpu.horovod_job", "--device", device, "--width", width]
    ddp = ["laboratory.gpu.ddp_job", "--device", device, "--width", width, "--backend", backend]
    return [
        Stage("ddp", partial(work.run_ranks, launcher="torchrun", job=ddp), 100),
        Stage("horovod", work.horovod, 60, required=True),
        Stage("horovod-ranks", partial(work.run_ranks, launcher="horovodrun", job=job), 100),
    ]


def tools(gpu: Gpu | None, device: str) -> list[Stage]:
    """Return the stages that watch kernels. A dry run makes the same calls unwatched."""
    size = "16.8M" if gpu else "20k"
    counters = [
        Stage(f"counters-{part}", partial(tool_work.counted, device=device, part=part, size=size), 70) for part in PARTS
    ]
    plain = Stage("calls", partial(tool_work.calls, device=device, each=3 if gpu else 1), 60)
    watched = [Stage(tool, partial(tool_work.sanitized, tool=tool, each=3), limit) for tool, limit in TOOLS.items() if gpu]
    return [plain, *watched[:2], *counters, *watched[2:]]
