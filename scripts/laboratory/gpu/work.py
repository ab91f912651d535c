"""The three calls of gpu_check, and their stages, the most telling ones first. `device` is cuda, or cpu in a dry run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from laboratory import ranks
from laboratory.gpu.stages import BUILD, PACKAGE, Clock, Failed, Gpu, Impossible, Record, Stage, program
from laboratory.machine import ROOT

CALLS = {"kernels": "build, tests, times", "ranks": "DDP, Horovod, NCCL", "tools": "compute-sanitizer, ncu"}

# Seconds of all stages of a call. With its start and end it then takes less than nine minutes.
TOTAL = 520.0

# Tests of whole steps, of kernels and of laws, as tests() wants them; and fewer for a dry run.
WANTED = ("tests/test_cuda.py",), ("tests/kernels",), ("tests/test_laws.py",)
WANTED_DRY = (
    ("tests/native/test_streams.py",),
    ("tests/kernels/test_delivery.py",),
    ("tests/test_laws.py", "test_conservation", "dense"),
)
TOOLS = {"memcheck": 110.0, "racecheck": 110.0, "synccheck": 90.0}
PARTS = ("passes", "sparse", "above", "sketches", "levels")

# Packages that every call needs.
PACKAGES = ("torch", "numpy", "pybind11", "pytest", "hypothesis")

PROBE = """
import json, torch
from laboratory import machine
print("@" + json.dumps({
    "versions": {**machine.versions(("torch", "numpy", "pybind11", "pytest", "hypothesis", "horovod")),
                 "torch_cuda": torch.version.cuda},
    "gpu": machine.describe_gpu() if torch.cuda.is_available() else None,
}))
"""
BUILT = 'import json; from gradcomp.native import extension; print("@" + json.dumps({"cuda": extension.BUILT_WITH_CUDA}))'
# pytest without the checkout's own gradcomp and its extension, which `-m pytest` puts first. The only plugin is xdist: those of
# other packages warn, and a warning is an error.
PYTEST = "import sys; sys.path.pop(0); import pytest; raise SystemExit(pytest.main(sys.argv[1:]))"
PLAIN = ("-v", "-o", "minversion=1", "-p", "no:cacheprovider")

# Every allocation is one of the driver's own: inside torch's, an access outside of an array hits another array.
OWN_ALLOCATIONS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# The status that compute-sanitizer ends with after an error. The calls end with 1.
FOUND = 99

# ncu's counters of each kernel: time, bytes, registers, instructions, and the share of the memory's and the warps' peaks.
COUNTERS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_bytes.sum",
    "launch__registers_per_thread",
    "smsp__inst_executed.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
# The clocks stay as they are: the machine is shared. Only the marked calls of the cases are counted.
NCU = "--clock-control none --profile-from-start off --csv --page raw --print-units base --kernel-name-base demangled"


def stages(call: str, gpu: Gpu | None) -> list[Stage]:
    """Return the stages of a call for this GPU; without one those of a dry run on the CPU, smaller."""
    device = "cuda" if gpu else "cpu"
    return [
        Stage("machine", partial(machine, device=device), 60, required=True),
        Stage("build", partial(build, device=device, gpu=gpu), 180, required=True),
        *{"kernels": kernels_call, "ranks": ranks_call, "tools": tools_call}[call](gpu, device),
    ]


def kernels_call(gpu: Gpu | None, device: str) -> list[Stage]:
    """Return the stages that test and measure kernels."""
    size, large, rounds = ("64M", "256M", 30) if gpu else ("100k", "200k", 2)
    first, of_kernels, of_laws = WANTED if gpu else WANTED_DRY
    return [
        Stage("steps", partial(tests, device=device, wanted=first), 80),
        Stage("kernels", partial(kernels, device=device, size=size, rounds=rounds), 90),
        Stage("tests", partial(tests, device=device, wanted=of_kernels, most_workers=8), 150),
        Stage("kernels-large", partial(kernels, device=device, size=large, rounds=max(2, rounds // 3)), 90),
        Stage("laws", partial(tests, device=device, wanted=of_laws, most_workers=8), 120),
    ]


def ranks_call(gpu: Gpu | None, device: str) -> list[Stage]:
    """Return the stages of two ranks that share the device, over NCCL on a GPU."""
    width, backend = ("2048", "nccl") if gpu else ("64", "gloo")
    job = ["laboratory.gpu.horovod_job", "--device", device, "--width", width]
    ddp = ["laboratory.gpu.ddp_job", "--device", device, "--width", width, "--backend", backend]
    return [
        Stage("ddp", partial(run_ranks, launcher="torchrun", job=ddp), 100),
        Stage("horovod-ranks", partial(run_ranks, launcher="horovodrun", job=job), 100),
    ]


def tools_call(gpu: Gpu | None, device: str) -> list[Stage]:
    """Return the stages that watch kernels. A dry run makes the same calls unwatched."""
    size = "16.8M" if gpu else "20k"
    counters = [Stage(f"counters-{part}", partial(counted, device=device, part=part, size=size), 70) for part in PARTS]
    plain = Stage("calls", partial(calls, device=device, each=3 if gpu else 1), 60)
    watched = [Stage(tool, partial(sanitized, tool=tool, each=3), limit) for tool, limit in TOOLS.items() if gpu]
    return [plain, *watched[:2], *counters, *watched[2:]]


def marked(text: str, mark: str = "@") -> Record:
    """Return the JSON after the mark, wherever a launcher put it in its line."""
    for line in text.splitlines():
        if f"{mark}{{" in line:
            found: Record = json.loads(line.partition(mark)[2])
            return found
    raise Failed(f"no result was printed\n{text[-2000:]}")


def machine(clock: Clock, device: str) -> Record:
    """List versions and the GPU. A missing necessity ends the call."""
    if lacking := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise Impossible(
            f"missing: {', '.join(lacking)}; install them, or carry their wheels along, which `pip download` fetches"
        )
    if device == "cuda" and program("nvcc") is None:
        raise Impossible("missing: nvcc; install the CUDA toolkit, or name its folder in CUDA_HOME")
    found = marked(clock.command([sys.executable, "-c", PROBE], cwd=BUILD))
    if nvcc := program("nvcc"):
        found["versions"]["nvcc"] = clock.command([nvcc, "--version"]).strip().splitlines()[-1]
    if device == "cuda" and found["gpu"] is None:
        named = f"torch {found['versions']['torch']} sees no GPU (its CUDA: {found['versions']['torch_cuda']})"
        raise Failed(f"{named}; use the Python that has a torch for the driver's CUDA")
    return found


def build(clock: Clock, device: str, gpu: Gpu | None) -> Record:
    """Build the extension for this GPU alone, beside a copy of the package."""
    tree = BUILD / "cmake"
    pybind = clock.command([sys.executable, "-c", "import pybind11; print(pybind11.get_cmake_dir())"]).strip().splitlines()[-1]
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind}"]
    options += ["-DGRADCOMP_CUDA=ON", f"-DGRADCOMP_CUDA_ARCHS={gpu.arch}"] if gpu else ["-DGRADCOMP_CUDA=OFF"]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    clock.command(["cmake", *generator, "-S", ROOT, "-B", tree, *options])
    clock.command(["cmake", "--build", tree, "--parallel"])
    (extension,) = tree.glob("_native*.so")
    shutil.rmtree(PACKAGE, ignore_errors=True)
    shutil.copytree(ROOT / "gradcomp", PACKAGE / "gradcomp", ignore=shutil.ignore_patterns("_native*.so", "__pycache__"))
    shutil.copy(extension, PACKAGE / "gradcomp")
    if marked(clock.command([sys.executable, "-c", BUILT], cwd=BUILD))["cuda"] != (device == "cuda"):
        raise Failed("Python imports another package than the built one, or that has the wrong kernels")
    return {"archs": gpu.arch if gpu else None, "bytes": extension.stat().st_size}


def tests(clock: Clock, device: str, wanted: Sequence[str], most_workers: int = 1) -> Record:
    """Run the tests named after the device, in processes that share it if pytest-xdist is there. Return pytest's last line.

    wanted: folders and files of tests; and words, which a test's name must have as well.
    """
    words = [each for each in wanted if not each.startswith("tests/")]
    options = [*PLAIN, "-k", " and ".join([device, *words])]
    workers = min(most_workers, len(os.sched_getaffinity(0)) // 2)
    if workers > 1 and importlib.util.find_spec("xdist"):
        options += ["-p", "xdist.plugin", "-n", str(workers)]
    command = [sys.executable, "-c", PYTEST, *options, *(each for each in wanted if each not in words)]
    said = clock.command(command, cwd=ROOT, OMP_NUM_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    last = said.strip().splitlines()[-1]
    if " passed" not in last:
        raise Failed(f"no test ran on {device}: {last}")
    return {"tests": last}


def kernels(clock: Clock, device: str, size: str, rounds: int) -> Record:
    """Run scripts/lab kernels on this device."""
    name = f"check-{size}"
    out = BUILD / f"kernels-{name}.json"
    out.unlink(missing_ok=True)
    lab: list[str | Path] = [sys.executable, ranks.SCRIPTS / "lab", "kernels", "--out", BUILD, "--name", name]
    clock.command([*lab, "--device", device, "--size", size, "--rounds", str(rounds)], cwd=ROOT)
    result = json.loads(out.read_text())
    return {key: result[key] for key in ("command", "settings", "lines", "targets")}


def run_ranks(clock: Clock, launcher: str, job: Sequence[str], count: int = 2) -> Record:
    """Run a job on ranks that share the device, and return its result. All its comparisons must hold."""
    words = ranks.command(launcher, count, job)
    text = clock.command(words, cwd=BUILD, CUBLAS_WORKSPACE_CONFIG=":4096:8", OMP_NUM_THREADS="1")
    found = marked(text, ranks.RESULT)
    wrong = [name for name, holds in found["checks"].items() if not holds]
    if wrong:
        raise Failed(f"these comparisons do not hold: {'; '.join(wrong)}; {json.dumps(found)}")
    return found


def calls(clock: Clock, device: str, each: int, before: tuple[str, ...] = (), **variables: str) -> Record:
    """Make legal calls of every kernel, and compare their results with definitions. `before`: a tool that watches them."""
    path = clock.environment.get("PYTHONPATH", "")
    command = [*before, sys.executable, "-m", "fuzz.watched", "--device", device, "--calls", str(each)]
    variables = {**variables, "PYTHONPATH": f"{path}:{ROOT / 'tests'}:{ROOT / 'tests' / 'helpers'}"}
    return marked(clock.command(command, cwd=BUILD, **variables))


def sanitized(clock: Clock, tool: str, each: int) -> Record:
    """Make the calls under a tool of compute-sanitizer, which fails where it finds an error."""
    sanitizer = program("compute-sanitizer")
    if sanitizer is None:
        raise Impossible("compute-sanitizer is missing; install the CUDA toolkit, or name its folder in CUDA_HOME")
    before = (sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *only_ours(sanitizer))
    try:
        return calls(clock, "cuda", each, before, **OWN_ALLOCATIONS)
    except Failed as error:
        if "Device not supported" in str(error):
            raise Impossible("compute-sanitizer refuses this GPU here (Device not supported), as in some sandboxes") from None
        raise


def only_ours(sanitizer: str) -> tuple[str, ...]:
    """Return the option that leaves out torch's kernels. Its name differs between versions."""
    described = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, timeout=30).stdout
    option = next((name for name in ("--kernel-name", "--kernel-regex") if re.search(rf"{name}\b(?!-)", described)), None)
    return (option, "kernel_substring=gradcomp") if option else ()


def counted(clock: Clock, device: str, part: str, size: str) -> Record:
    """Run the cases of a part of lab kernels, once each. Return ncu's table of their kernels. A CPU only runs the cases."""
    cases = [sys.executable, "-m", "laboratory.gpu.counted_cases", "--device", device, "--part", part, "--size", size]
    if device == "cpu":
        return marked(clock.command(cases, cwd=BUILD))
    ncu, log = program("ncu"), BUILD / f"counters-{part}.csv"
    if ncu is None:
        raise Impossible("ncu is missing; install Nsight Compute, or name the toolkit's folder in CUDA_HOME")
    log.write_text("")
    options = [*NCU.split(), "--kernel-name", "regex:gradcomp", "--log-file", str(log), "--metrics", ",".join(COUNTERS)]
    try:
        found = marked(clock.command([ncu, *options, *cases], cwd=BUILD))
    except Failed as error:
        raise Failed(f"{log.read_text()[-1000:]}\n{error}") from None
    _, begin, rest = log.read_text().partition('"ID"')  # ncu's messages stand before its table
    if rest.count("\n") < 3:
        raise Failed(f"ncu counted no kernel of gradcomp\n{log.read_text()[-1000:]}")
    return {**found, "kernels": (begin + rest).splitlines()}
