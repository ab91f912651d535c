"""The calls of gpu_check, and their stages, the most telling ones first. `device` is cuda, or cpu in a dry run."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from laboratory import ranks, report
from laboratory.gpu import packing, shaping
from laboratory.gpu.stages import (
    BUILD,
    PACK,
    PACKAGE,
    Clock,
    Failed,
    Gpu,
    Impossible,
    Output,
    Record,
    Stage,
    environment,
    marked,
    program,
    run,
)
from laboratory.machine import ROOT, slug

# The seconds that a call may take, in the order in which a sitting makes them; and those of a sitting, whose end is theirs.
CALLS = {"tests": 280, "prices": 90, "links": 310, "kernels": 280, "steps": 405}
SITTING = 840.0
ABOUT = {
    "tests": "are whole steps, kernels, laws and ranks right?",
    "prices": "what the host pays for a launch, an event, a hook",
    "links": "a GPT's steps over links of 25, 10 and 1 Gbit/s between ranks that share the GPU, and a race",
    "kernels": "times, compute-sanitizer, ncu",
    "steps": "a GPT's steps, local steps, trainings",
}
# Seconds of a call that its stages leave to its start and end.
MARGIN = 10
# Seconds that a program of trainings takes to start, and to end.
STARTING = 12.0
# Seconds of a call in a dry run, and of each of its stages: a build alone takes minutes of two cores.
DRY = 900.0

# Tests of whole steps, of kernels and of laws, as tests() wants them; and fewer for a dry run. The laws with three ranks are a
# fifth of all.
WANTED = ("tests/test_cuda.py",), ("tests/kernels", "tests/native"), ("tests/test_laws.py", "cuda-3")
WANTED_DRY = (
    ("tests/native/test_streams.py",),
    ("tests/kernels/test_gradients.py",),
    ("tests/test_laws.py", "test_conservation", "dense"),
)
# The sizes of lab kernels: the large one, a ResNet-50's, and a bucket of 25 MB; and the rounds.
SIZES = {"64M": ((), 8), "25.6M": (("--layers", "161"), 6), "6.25M": ((), 12)}
SIZES_DRY = {"100k": ((), 2)}
# The ranks that share the device behind links; the seconds of their steps, and of the race of a way.
LINKS, LINKS_DRY = ((2, 100.0, 6.0), (4, 75.0, 0.0)), ((2, 60.0, 0.5), (4, 60.0, 0.0))
# The tools of compute-sanitizer, each with its own options. initcheck leaves out torch's copies: the calls have arrays without
# contents on purpose.
TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": (),
    "racecheck": (),
    "synccheck": (),
    "initcheck": ("--check-api-memory-access", "no"),
}
PARTS = ("sparse", "levels", "above", "sketches", "passes")

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


def total(call: str) -> float:
    """Return the seconds of all stages of a call."""
    return CALLS[call] - MARGIN


def stages(call: str, gpu: Gpu | None) -> list[list[Stage]]:
    """Return the groups of a call's stages for this GPU; without one those of a dry run on the CPU, smaller."""
    device = "cuda" if gpu else "cpu"
    groups: list[list[Stage]] = [
        [Stage("machine", partial(machine, device=device), 25, required=True)],
        [Stage("build", partial(build, device=device, gpu=gpu), 100, required=True)],
        *OF_CALLS[call](gpu, device),
    ]
    return groups if gpu else [[replace(stage, limit=DRY) for stage in group] for group in groups]


def sitting(calls: Sequence[str], gpu: Gpu | None, folder: Path, within: float) -> list[Record]:
    """Make calls one after another, within so many seconds together. Return the records of their stages."""
    packing.offer_programs()
    end, every = time.monotonic() + within, list[Record]()
    for call in calls:
        output = Output(folder, call, gpu)
        limit = min(total(call), end - time.monotonic()) if gpu else DRY
        every += run(stages(call, gpu), limit, output.log, environment(), output.write)
        print(f"written: {output.result}")
    return every


def tests_call(gpu: Gpu | None, device: str) -> list[list[Stage]]:
    """Return the stages that tell whether all is right. Two ranks share the device, over NCCL on a GPU."""
    of_steps, of_kernels, of_laws = WANTED if gpu else WANTED_DRY
    options = ["--device", device, "--width", "1024" if gpu else "64"]
    backend = ["--backend", "nccl" if gpu else "gloo"]
    jobs = {
        "doors": ("torchrun", ["laboratory.gpu.job", "doors", *options, *backend]),
        "ddp": ("torchrun", ["laboratory.gpu.job", "ddp", *options, *backend]),
        "horovod-ranks": ("horovodrun", ["laboratory.gpu.job", "horovod", *options]),
    }
    return [
        [Stage(name, partial(run_ranks, launcher=launcher, job=job), 105) for name, (launcher, job) in jobs.items()],
        [
            Stage("whole-steps", partial(tests, device=device, wanted=of_steps), 110),
            Stage("kernels", partial(tests, device=device, wanted=of_kernels, most_workers=7), 140),
            Stage("laws", partial(tests, device=device, wanted=of_laws, most_workers=6), 110),
        ],
    ]


def kernels_call(gpu: Gpu | None, device: str) -> list[list[Stage]]:
    """Return the stages that time kernels, watch them and count. A dry run makes the watched calls without a tool."""
    sizes, size = (SIZES, "16.8M") if gpu else (SIZES_DRY, "20k")
    timed = [Stage(f"times-{name}", partial(kernels, device=device, size=name), 35) for name in sizes]
    plain = Stage("calls", partial(calls, device=device, each=2 if gpu else 1), 55)
    watched = [Stage(tool, partial(sanitized, tool=tool, each=2), 55) for tool in TOOLS if gpu]
    counters = [Stage(f"counters-{part}", partial(counted, device=device, part=part, size=size), 17) for part in PARTS]
    return [*([stage] for stage in timed), [plain, *watched], *([stage] for stage in counters)]


def steps_call(gpu: Gpu | None, device: str) -> list[list[Stage]]:
    """Return the stages that train, at last those that take all the time that there is."""
    files = {"local_steps": packing.TEXT, "training": packing.PICTURES}
    data = {module: PACK / file if gpu else None for module, file in files.items()}
    training = {module: partial(trained, device=device, module=module, parts="trainings", data=data[module]) for module in data}
    return [
        [Stage("gpt", partial(trained, device=device, module="gpt_steps", parts="ways"), 75)],
        [Stage("local-steps", training["local_steps"], 60)],
        [Stage("training", training["training"], 235)],
    ]


def prices_call(gpu: Gpu | None, device: str) -> list[list[Stage]]:
    """Return the stage that times the host."""
    return [[Stage("prices", partial(trained, device=device, module="prices", parts="ways"), 55)]]


def links_call(gpu: Gpu | None, device: str) -> list[list[Stage]]:
    """Return the stages that time steps over links, by ranks."""
    return [
        [Stage(f"links-{count}", partial(linked, device=device, count=count, limit=limit, of_race=race), limit + 5 * race + 35)]
        for count, limit, race in (LINKS if gpu else LINKS_DRY)
    ]


OF_CALLS = {"tests": tests_call, "prices": prices_call, "links": links_call, "kernels": kernels_call, "steps": steps_call}


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
    """Copy the package to where every stage finds it, with the parts of the pack. Build the extension unless it is there."""
    arch = gpu.arch if gpu else None
    shutil.rmtree(PACKAGE, ignore_errors=True)
    shutil.copytree(ROOT / "gradcomp", PACKAGE / "gradcomp", ignore=shutil.ignore_patterns("_native*.so", "__pycache__"))
    prepared, said = packing.install(clock, arch)
    if "extension" not in prepared:
        shutil.copy(packing.compiled(clock, sys.executable, BUILD / "cmake", arch), PACKAGE / "gradcomp")
        if marked(clock.command([sys.executable, "-c", packing.EXTENSION], cwd=BUILD))["cuda"] != (device == "cuda"):
            raise Failed("Python imports another package than the built one, or that has the wrong kernels")
    return {"arch": arch, "prepared": prepared, "said": said}


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


def kernels(clock: Clock, device: str, size: str) -> Record:
    """Run scripts/lab kernels on this device."""
    layers, rounds = (SIZES if device == "cuda" else SIZES_DRY)[size]
    name = slug(f"check-{size}")
    out = BUILD / f"kernels-{name}.json"
    out.unlink(missing_ok=True)
    lab: list[str | Path] = [sys.executable, ranks.SCRIPTS / "lab", "kernels", "--out", BUILD, "--name", name]
    clock.command([*lab, "--device", device, "--size", size, *layers, "--rounds", str(rounds)], cwd=ROOT)
    result = json.loads(out.read_text())
    return {key: result[key] for key in ("command", "settings", "lines")}


def trained(clock: Clock, device: str, module: str, parts: str, data: Path | None = None) -> Record:
    """Run a program that trains, and return its record's settings and parts, none of which may have failed.

    Trainings get the seconds that are left, and end in them.
    """
    if data and not data.is_file():
        raise Impossible(f"no {data.name} was packed: scripts/gpu_check --prepare --data FOLDER packs it")
    command: list[str | Path] = [sys.executable, "-m", f"laboratory.gpu.{module}", "--device", device]
    command += ["--data", data] if data else []
    command += ["--seconds", f"{clock.left() - STARTING:.0f}"] if parts == "trainings" else []
    variables = {} if device == "cuda" else {"OMP_NUM_THREADS": "1"}
    return without_errors(kept(clock, command, {}, **variables), parts)


def kept(clock: Clock, words: Sequence[str | Path], begun: Record, **variables: str) -> Record:
    """Run a program that writes its record anew after each of its parts to --out. However it ends, keep what it wrote.

    begun: the record that it finds there; none if empty.
    """
    out = clock.log.with_suffix(".json")  # beside the result: it remains if the whole call is ended
    if begun:
        report.write(out, begun)
    try:
        clock.command([*words, "--out", out.absolute()], cwd=BUILD, **variables)
    except Failed as error:
        raise Failed(str(error), report.read(out) if out.is_file() else None) from None
    else:
        return report.read(out)
    finally:
        out.unlink(missing_ok=True)


def without_errors(found: Record, *parts: str) -> Record:
    """Return a record whose parts have no errors."""
    if wrong := [each for part in parts for each in found[part] if "error" in each]:
        raise Failed("\n".join(json.dumps(each) for each in wrong), found)
    return found


def linked(clock: Clock, device: str, count: int, limit: float, of_race: float) -> Record:
    """Time steps over shaped links, which the first rung of the ladder makes that holds what it says."""
    said = list[str]()
    for how, backend in itertools.product(shaping.LADDER, ("nccl", "gloo") if device == "cuda" else ("gloo",)):
        if lacking := shaping.missing(how):
            said += [] if f"{how}: {lacking}" in said else [f"{how}: {lacking}"]
            continue
        fields = {"device": device, "backend": backend, "how": how, "limit": limit, "of_race": of_race}
        try:
            found = _in_spite_of_ends(clock, fields, count)
        except Failed as error:
            if error.figures and error.figures["lines"]:
                raise
            said.append(f"{how}, {backend}: {error}")
            continue
        if "refused" not in found:
            return without_errors({**found, "said": said}, "lines", "race")
        said.append(found["refused"])
    raise Failed("\n".join(said))


def _in_spite_of_ends(clock: Clock, fields: Record, count: int) -> Record:
    """Start new ranks where some ended, as with a way that hangs: they go on behind it, in the time that is left."""
    began, found = time.monotonic(), Record()
    while True:
        left = {"limit": max(0.0, fields["limit"] - (time.monotonic() - began))} if found else {}
        job = ["laboratory.gpu.links", json.dumps({**fields, **left})]
        before = _parts(found)
        try:
            return kept(clock, shaping.command(fields["how"], count, job), found, OMP_NUM_THREADS="1")
        except Failed as error:
            found = error.figures or {}
            if clock.left() <= 0 or _parts(found) <= before:
                raise


def _parts(found: Record) -> int:
    return len(found.get("lines", ())) + len(found.get("race", ()))


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
    # initcheck must see torch's kernels write, too.
    watched = TOOLS[tool] or only_ours(sanitizer)
    before = (sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *watched)
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
    cases = [sys.executable, "-m", "laboratory.kernel_cases", "--device", device, "--part", part, "--size", size]
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
