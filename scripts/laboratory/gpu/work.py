"""The stages of the check. Each is a function of the clock. `device` is cuda, or cpu in a dry run."""

from __future__ import annotations

import json
import shutil
import sys
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from laboratory import ranks
from laboratory.gpu import horovod_build
from laboratory.gpu.gpu import Gpu
from laboratory.gpu.place import BUILD, HOROVOD, HOROVOD_NCCL, PACKAGE, PREPARED, SITE, environment
from laboratory.gpu.prepare import unpack_missing
from laboratory.gpu.stages import Clock, Failed, Impossible, Record, Stage
from laboratory.machine import ROOT

# Packages that the check needs, and others that it can use.
REQUIRED_PACKAGES = ("torch", "numpy", "pybind11", "pytest", "hypothesis")
OPTIONAL_PACKAGES = ("cupy", "horovod", "cloudpickle", "psutil", "yaml", "packaging", "setuptools", "ninja")

# Tests that run on a device, and those that run under compute-sanitizer.
TESTS = ("tests/kernels", "tests/compressors", "tests/test_laws.py", "tests/test_simulate.py", "tests/test_cuda.py")
WATCHED = ("tests/kernels",)

PROBE = """
import importlib.util, json, torch
from laboratory import machine
cuda = torch.cuda.is_available()
print("@" + json.dumps({
    "missing": [name for name in %r if importlib.util.find_spec(name) is None],
    "versions": {**machine.versions(("torch", "numpy", "pybind11", "pytest", "hypothesis", "horovod", "cupy-cuda13x")),
                 "torch_cuda": torch.version.cuda},
    "gpu": machine.describe_gpu() if cuda else None,
}))
"""


def marked(text: str, mark: str = "@") -> Record:
    """Return the JSON after the mark, wherever a launcher put it in its line."""
    for line in text.splitlines():
        if f"{mark}{{" in line:
            found: Record = json.loads(line.partition(mark)[2])
            return found
    raise Failed(f"no result was printed\n{text[-2000:]}")


def tools(clock: Clock, device: str) -> Record:
    """List what is there and what is missing, after unpacking the downloads of --prepare."""
    unpacked = unpack_missing(PREPARED, SITE, (*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES))
    found = marked(clock.command([sys.executable, "-c", PROBE % ((*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES),)], cwd=BUILD))
    found["missing"] += [name for name in ("cmake", "nvcc") if not shutil.which(name)]
    found["unpacked"] = unpacked
    if shutil.which("nvcc"):
        found["versions"]["nvcc"] = clock.command(["nvcc", "--version"]).strip().splitlines()[-1]
    if device == "cuda" and found["gpu"] is None:
        own, cuda = found["versions"]["torch"], found["versions"]["torch_cuda"]
        raise Failed(f"torch {own} sees no GPU (its CUDA: {cuda}); install a torch for the driver's CUDA")
    return found


def build(clock: Clock, device: str, gpu: Gpu | None) -> Record:
    """Build the extension for this GPU alone, beside a copy of the package."""
    for program in ("cmake", *(["nvcc"] if device == "cuda" else [])):
        if not shutil.which(program):
            raise Impossible(f"{program} is missing; install it")
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
    ask = 'import json; from gradcomp.native import extension as own; print("@" + json.dumps({"cuda": own.BUILT_WITH_CUDA}))'
    found = marked(clock.command([sys.executable, "-c", ask], cwd=BUILD))
    if found["cuda"] != (device == "cuda"):
        raise Failed("Python imports another package than the built one, or that has the wrong kernels")
    return {"archs": gpu.arch if gpu else None, "bytes": extension.stat().st_size}


def tests(clock: Clock, device: str) -> Record:
    """Run the tests that run on a device."""
    return run_tests(clock, device, TESTS)


def watched(clock: Clock, tool: str) -> Record:
    """Run the kernels' tests, with fewer examples each, under a tool of compute-sanitizer."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise Impossible("compute-sanitizer is missing; install the CUDA toolkit, or put its bin folder on PATH")
    before = [program, "--tool", tool, "--error-exitcode", "99", "--target-processes", "all"]
    return run_tests(clock, "cuda", WATCHED, before, ["--hypothesis-profile", "few"])


def run_tests(
    clock: Clock, device: str, wanted: Sequence[str], before: Sequence[str] = (), options: Sequence[str] = ()
) -> Record:
    """Run the tests that are named after the device. `before`: a program that runs pytest."""
    report = BUILD / "tests.xml"
    report.unlink(missing_ok=True)
    # Not `-m pytest`: that puts the checkout's own gradcomp, and its extension, first.
    start = "import sys; sys.path.pop(0); import pytest; raise SystemExit(pytest.main(sys.argv[1:]))"
    common = ["-q", "-k", device, "-o", "minversion=1", "-p", "no:cacheprovider", f"--junitxml={report}"]
    paths = [path for path in wanted if (ROOT / path).exists()]
    try:
        clock.command([*before, sys.executable, "-c", start, *common, *options, *paths], cwd=ROOT)
    except Failed as error:
        figures = count(report) if report.exists() else None
        if not figures or not figures["failures"]:
            raise
        raise Failed(
            f"{len(figures['failures'])} of {figures['tests']} tests failed: {figures['failures'][:20]}\n{error}"
        ) from None
    figures = count(report)
    if figures["tests"] == figures["skipped"]:
        raise Failed(f"no test ran on {device}")
    return figures


def count(report: Path) -> Record:
    """Count the tests in pytest's report."""
    cases = list(xml.parse(report).getroot().iter("testcase"))
    bad = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {"tests": len(cases), "skipped": sum(case.find("skipped") is not None for case in cases), "failures": bad}


def kernels(clock: Clock, device: str, size: str) -> Record:
    """Run scripts/lab kernels on this device."""
    out = BUILD / "kernels-check.json"
    out.unlink(missing_ok=True)
    rounds = "30" if device == "cuda" else "2"
    lab: list[str | Path] = [sys.executable, ranks.SCRIPTS / "lab", "kernels", "--out", BUILD, "--name", "check"]
    clock.command([*lab, "--device", device, "--size", size, "--rounds", rounds], cwd=ROOT)
    result = json.loads(out.read_text())
    return {key: result[key] for key in ("command", "settings", "lines", "targets")}


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


def stages(gpu: Gpu | None) -> list[Stage]:
    """Return the whole check for this GPU; without one a dry run on the CPU, smaller."""
    device, size, width = ("cuda", "64M", "2048") if gpu else ("cpu", "100k", "64")
    everywhere = [
        Stage("tools", partial(tools, device=device), 60),
        Stage("build", partial(build, device=device, gpu=gpu), 180, ("tools",)),
        Stage("tests", partial(tests, device=device), 180, ("build",)),
        Stage("kernels", partial(kernels, device=device, size=size), 90, ("build",)),
        Stage("horovod", partial(horovod, gpu=gpu), 240, ("tools",)),
        Stage("ranks", partial(horovod_ranks, device=device, width=width), 90, ("build", "horovod")),
        Stage("ddp", partial(ddp, device=device, width=width, backend="gloo", count=2), 90, ("build",)),
    ]
    if gpu is None:
        return everywhere
    return [
        *everywhere,
        Stage("memcheck", partial(watched, tool="memcheck"), 90, ("build",)),
        Stage("racecheck", partial(watched, tool="racecheck"), 90, ("build",)),
        Stage("ddp-nccl", partial(ddp, device=device, width=width, backend="nccl", count=1), 60, ("build",)),
        Stage("nccl", partial(nccl, gpu=gpu, width=width), 240, ("build",)),
    ]


NAMES = [stage.name for stage in stages(Gpu("", "", "0.0", ""))]
