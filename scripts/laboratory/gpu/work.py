"""The stages of gpu_check that build, test and measure, as functions of the clock. `device` is cuda, or cpu in a dry run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path

from laboratory import ranks
from laboratory.gpu.gpu import Gpu
from laboratory.gpu.needs import OPTIONAL_PACKAGES, PREPARE, REQUIRED_PACKAGES, missing
from laboratory.gpu.place import BUILD, PACKAGE, PREPARED, SITE, program
from laboratory.gpu.prepare import unpack_missing
from laboratory.gpu.stages import Clock, Failed, Impossible, Record, TimedOut
from laboratory.machine import ROOT

# The only plugin that tests need. Those of other packages warn, and a warning is an error.
PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

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


def machine(clock: Clock, device: str) -> Record:
    """List what is there, after unpacking the downloads of --prepare. What every stage needs and is missing ends the call."""
    packages = (*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES)
    unpacked = []
    if all(PREPARE in each for each in missing(device == "cuda")):  # else nothing that is unpacked would help
        unpacked = unpack_missing(PREPARED, SITE, packages)
    if lacking := missing(device == "cuda"):
        raise Impossible("missing: " + "; ".join(lacking))
    found = marked(clock.command([sys.executable, "-c", PROBE % (packages,)], cwd=BUILD))
    found["unpacked"] = unpacked
    if nvcc := program("nvcc"):
        found["versions"]["nvcc"] = clock.command([nvcc, "--version"]).strip().splitlines()[-1]
    if device == "cuda":
        check_cuda(found)
    return found


def check_cuda(found: Record) -> None:
    """Refuse a torch that sees no GPU, and an nvcc whose kernels would not run beside it."""
    own, cuda, nvcc = (found["versions"].get(name) for name in ("torch", "torch_cuda", "nvcc"))
    if cuda is None:
        raise Failed(f"torch {own} is built for CPUs; use the Python that has a torch for CUDA")
    if found["gpu"] is None:
        raise Failed(f"torch {own} sees no GPU (its CUDA: {cuda}); install a torch for the driver's CUDA")
    major = re.search(r"cuda_(\d+)\.", nvcc or "")
    if major and major[1] != cuda.partition(".")[0]:
        raise Failed(f"nvcc is of CUDA {major[1]}, but torch {own} of CUDA {cuda}; name another toolkit in CUDA_HOME")


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
    ask = 'import json; from gradcomp.native import extension as own; print("@" + json.dumps({"cuda": own.BUILT_WITH_CUDA}))'
    found = marked(clock.command([sys.executable, "-c", ask], cwd=BUILD))
    if found["cuda"] != (device == "cuda"):
        raise Failed("Python imports another package than the built one, or that has the wrong kernels")
    return {"archs": gpu.arch if gpu else None, "bytes": extension.stat().st_size}


def tests(clock: Clock, device: str, wanted: Sequence[str], most_workers: int = 1) -> Record:
    """Run those tests that are named after the device, in processes that share it, if pytest-xdist is there.

    wanted: folders and files of tests; and words, which a test's name must have as well.
    """
    report = BUILD / "tests.xml"
    report.unlink(missing_ok=True)
    # Not `-m pytest`: that puts the checkout's own gradcomp, and its extension, first.
    start = "import sys; sys.path.pop(0); import pytest; raise SystemExit(pytest.main(sys.argv[1:]))"
    words = [each for each in wanted if not each.startswith("tests/")]
    common = [
        "-v",
        "-k",
        " and ".join([device, *words]),
        "-o",
        "minversion=1",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    workers = min(most_workers, len(os.sched_getaffinity(0)) // 2)
    if workers > 1 and importlib.util.find_spec("xdist"):
        common += ["-p", "xdist.plugin", "-n", str(workers)]
    try:
        clock.command(
            [sys.executable, "-c", start, *common, *(each for each in wanted if each not in words)],
            cwd=ROOT,
            OMP_NUM_THREADS="1",
            **PLUGINS,
        )
    except TimedOut as error:
        raise TimedOut(f"{so_far(clock.output())}\n{error}") from None
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


def so_far(text: str) -> str:
    """Count the tests that have ended, from pytest's lines: it writes its report only at its end."""
    alone = re.findall(r"^(\S+) (PASSED|FAILED|ERROR|SKIPPED)\b.*\[", text, re.MULTILINE)
    shared = re.findall(r"^\[gw\d+\].* (PASSED|FAILED|ERROR|SKIPPED) (\S+)", text, re.MULTILINE)
    every = [*alone, *((name, outcome) for outcome, name in shared)]
    ended, bad = [outcome for _, outcome in every], [name for name, outcome in every if outcome in ("FAILED", "ERROR")]
    return f"{len(ended)} tests had ended, {ended.count('PASSED')} of them passed; failures: {bad[:20]}"


def count(report: Path) -> Record:
    """Count the tests in pytest's report."""
    cases = list(xml.parse(report).getroot().iter("testcase"))
    bad = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {"tests": len(cases), "skipped": sum(case.find("skipped") is not None for case in cases), "failures": bad}


def kernels(clock: Clock, device: str, size: str, rounds: int) -> Record:
    """Run scripts/lab kernels on this device."""
    name = f"check-{size}"
    out = BUILD / f"kernels-{name}.json"
    out.unlink(missing_ok=True)
    lab: list[str | Path] = [sys.executable, ranks.SCRIPTS / "lab", "kernels", "--out", BUILD, "--name", name]
    clock.command([*lab, "--device", device, "--size", size, "--rounds", str(rounds)], cwd=ROOT)
    result = json.loads(out.read_text())
    return {key: result[key] for key in ("command", "settings", "lines", "targets")}
