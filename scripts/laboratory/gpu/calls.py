"""The three calls of gpu_check, and their stages in the order of what they tell."""

from __future__ import annotations

from functools import partial

from laboratory.gpu import rank_work, tool_work, work
from laboratory.gpu.gpu import Gpu
from laboratory.gpu.stages import Stage

# Seconds of all stages of a call. With its start and end it then takes less than nine minutes.
TOTAL = 520.0

# Tests of whole steps, of kernels and of laws, as work.tests() wants them.
WANTED: tuple[tuple[str, ...], ...] = (("tests/test_cuda.py",), ("tests/kernels",), ("tests/test_laws.py",))
WANTED_DRY: tuple[tuple[str, ...], ...] = (
    ("tests/native/test_streams.py",),
    ("tests/kernels/test_delivery.py",),
    ("tests/test_laws.py", "test_conservation", "dense"),
)
# Processes that share the GPU for the tests, where tests are many.
WORKERS = 8
TOOLS = {"memcheck": 110.0, "racecheck": 110.0, "initcheck": 90.0, "synccheck": 90.0}
PARTS = ("passes", "sparse", "above", "sketches", "levels")


def stages(call: str, gpu: Gpu | None) -> list[Stage]:
    """Return the stages of a call for this GPU; without one those of a dry run on the CPU, smaller."""
    device = "cuda" if gpu else "cpu"
    begin = [
        Stage("machine", partial(work.machine, device=device), 60),
        Stage("build", partial(work.build, device=device, gpu=gpu), 180, ("machine",)),
    ]
    return begin + {"kernels": kernels, "ranks": ranks, "tools": tools}[call](gpu, device)


def kernels(gpu: Gpu | None, device: str) -> list[Stage]:
    """Return the stages that test and measure kernels."""
    size, large, rounds = ("64M", "256M", 30) if gpu else ("100k", "200k", 2)
    first, of_kernels, of_laws = WANTED if gpu else WANTED_DRY
    return [
        Stage("steps", partial(work.tests, device=device, wanted=first), 80, ("build",)),
        Stage("kernels", partial(work.kernels, device=device, size=size, rounds=rounds), 90, ("build",)),
        Stage("tests", partial(work.tests, device=device, wanted=of_kernels, most_workers=WORKERS), 150, ("build",)),
        Stage("kernels-large", partial(work.kernels, device=device, size=large, rounds=max(2, rounds // 3)), 90, ("build",)),
        Stage("laws", partial(work.tests, device=device, wanted=of_laws, most_workers=WORKERS), 120, ("build",)),
    ]


def ranks(gpu: Gpu | None, device: str) -> list[Stage]:
    """Return the stages of ranks. NCCL takes no two ranks on one GPU."""
    width = "2048" if gpu else "64"
    ddp = [Stage("ddp", partial(rank_work.ddp, device=device, width=width, backend="gloo", count=2), 100, ("build",))]
    horovod = [
        Stage("horovod", partial(rank_work.horovod, gpu=gpu), 200, ("machine",)),
        Stage("ranks", partial(rank_work.horovod_ranks, device=device, width=width), 100, ("build", "horovod")),
    ]
    if gpu is None:
        return ddp + horovod
    alone = Stage("ddp-nccl", partial(rank_work.ddp, device=device, width=width, backend="nccl", count=1), 60, ("build",))
    return [*ddp, alone, *horovod, Stage("nccl", partial(rank_work.nccl, gpu=gpu, width=width), 220, ("build",))]


def tools(gpu: Gpu | None, device: str) -> list[Stage]:
    """Return the stages that watch kernels. A dry run makes the same calls unwatched."""
    size = "16.8M" if gpu else "20k"
    counters = [
        Stage(f"counters-{part}", partial(tool_work.counted, device=device, part=part, size=size), 70, ("build",))
        for part in PARTS
    ]
    plain = Stage("calls", partial(tool_work.calls, device=device, each=3 if gpu else 1), 60, ("build",))
    if gpu is None:
        return [plain, *counters]
    watched = [Stage(tool, partial(tool_work.sanitized, tool=tool, each=3), limit, ("build",)) for tool, limit in TOOLS.items()]
    return [plain, *watched[:2], *counters, *watched[2:]]


CALLS = {"kernels": "build, tests, times", "ranks": "Horovod, DDP, NCCL", "tools": "compute-sanitizer, ncu"}
SOME_GPU = Gpu("", "", "0.0", "")
NAMES = list(dict.fromkeys(stage.name for call in CALLS for stage in stages(call, SOME_GPU)))
