"""The stages of gpu_check that build, test, measure and run ranks. `device` is cuda, or cpu in a dry run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from laboratory import ranks
from laboratory.gpu.place import BUILD, HOROVOD, PACKAGE, Gpu, missing, program
from laboratory.gpu.stages import Clock, Failed, Impossible, Record, TimedOut
from laboratory.machine import ROOT

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
ASK_HOROVOD = 'import json, horovod.torch as h; print("@" + json.dumps({"gloo": h.gloo_built(), "nccl": bool(h.nccl_built())}))'

# pytest without the checkout's own gradcomp and its extension, which `-m pytest` puts first. The only plugin is xdist: those of
# other packages warn, and a warning is an error.
PYTEST = "import sys; sys.path.pop(0); import pytest; raise SystemExit(pytest.main(sys.argv[1:]))"
PLAIN = ("-v", "-o", "minversion=1", "-p", "no:cacheprovider")


def marked(text: str, mark: str = "@") -> Record:
    """Return the JSON after the mark, wherever a launcher put it in its line."""
    for line in text.splitlines():
        if f"{mark}{{" in line:
            found: Record = json.loads(line.partition(mark)[2])
            return found
    raise Failed(f"no result was printed\n{text[-2000:]}")


def machine(clock: Clock, device: str) -> Record:
    """List versions and the GPU. A missing necessity ends the call."""
    if lacking := missing(device == "cuda"):
        raise Impossible("missing: " + "; ".join(lacking))
    found = marked(clock.command([sys.executable, "-c", PROBE], cwd=BUILD))
    if nvcc := program("nvcc"):
        found["versions"]["nvcc"] = clock.command([nvcc, "--version"]).strip().splitlines()[-1]
    if device == "cuda":
        check_cuda(found)
    return found


def check_cuda(found: Record) -> None:
    """Refuse a torch that sees no GPU, and an nvcc of another CUDA than torch's."""
    torch, cuda, nvcc = (found["versions"].get(name) for name in ("torch", "torch_cuda", "nvcc"))
    if cuda is None:
        raise Failed(f"torch {torch} is built for CPUs; use the Python that has a torch for CUDA")
    if found["gpu"] is None:
        raise Failed(f"torch {torch} sees no GPU (its CUDA: {cuda}); install a torch for the driver's CUDA")
    major = re.search(r"cuda_(\d+)\.", nvcc or "")
    if major and major[1] != cuda.partition(".")[0]:
        raise Failed(f"nvcc is of CUDA {major[1]}, but torch {torch} of CUDA {cuda}; name another toolkit in CUDA_HOME")


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
    """Run the tests named after the device, in processes that share it if pytest-xdist is there.

    wanted: folders and files of tests; and words, which a test's name must have as well.
    """
    words = [each for each in wanted if not each.startswith("tests/")]
    options = [*PLAIN, "-k", " and ".join([device, *words])]
    workers = min(most_workers, len(os.sched_getaffinity(0)) // 2)
    if workers > 1 and importlib.util.find_spec("xdist"):
        options += ["-p", "xdist.plugin", "-n", str(workers)]
    command = [sys.executable, "-c", PYTEST, *options, *(each for each in wanted if each not in words)]
    try:
        clock.command(command, cwd=ROOT, OMP_NUM_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    except (Failed, TimedOut) as error:
        found = outcomes(clock.output())
        bad = found["failures"]
        raise type(error)(f"{len(bad)} of {found['tests']} tests that had ended failed: {bad[:20]}\n{error}") from None
    found = outcomes(clock.output())
    if found["tests"] == found["skipped"]:
        raise Failed(f"no test ran on {device}")
    return found


def outcomes(text: str) -> Record:
    """Count the tests that have ended, in pytest's lines by one process or several."""
    alone = re.findall(r"^(tests/\S+) (PASSED|FAILED|ERROR|SKIPPED)\b.*\[", text, re.MULTILINE)
    shared = re.findall(r"^\[gw\d+\].* (PASSED|FAILED|ERROR|SKIPPED) (\S+)", text, re.MULTILINE)
    ended = [*alone, *((name, outcome) for outcome, name in shared)]
    failures = [name for name, outcome in ended if outcome in ("FAILED", "ERROR")]
    return {"tests": len(ended), "skipped": sum(outcome == "SKIPPED" for _, outcome in ended), "failures": failures}


def kernels(clock: Clock, device: str, size: str, rounds: int) -> Record:
    """Run scripts/lab kernels on this device."""
    name = f"check-{size}"
    out = BUILD / f"kernels-{name}.json"
    out.unlink(missing_ok=True)
    lab: list[str | Path] = [sys.executable, ranks.SCRIPTS / "lab", "kernels", "--out", BUILD, "--name", name]
    clock.command([*lab, "--device", device, "--size", size, "--rounds", str(rounds)], cwd=ROOT)
    result = json.loads(out.read_text())
    return {key: result[key] for key in ("command", "settings", "lines", "targets")}


def horovod(clock: Clock) -> Record:
    """Say how the Horovod that is installed or carried along was built."""
    if importlib.util.find_spec("horovod") is None and not HOROVOD.exists():
        raise Impossible("Horovod is missing; install it, or carry a build for this torch along as build/gpu-horovod")
    return marked(clock.command([sys.executable, "-c", ASK_HOROVOD], cwd=BUILD))


def run_ranks(clock: Clock, launcher: str, job: Sequence[str], count: int = 2) -> Record:
    """Run a job on ranks that share the device, and return its result. All its comparisons must hold."""
    words = ranks.command(launcher, count, job)
    text = clock.command(words, cwd=BUILD, CUBLAS_WORKSPACE_CONFIG=":4096:8", OMP_NUM_THREADS="1")
    found = marked(text, ranks.RESULT)
    wrong = [name for name, holds in found["checks"].items() if not holds]
    if wrong:
        raise Failed(f"these comparisons do not hold: {'; '.join(wrong)}; {json.dumps(found)}")
    return found
