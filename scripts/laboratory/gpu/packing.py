"""All that can be made before there is a GPU machine, packed into one folder that travels with the checkout; and its use there.

The pack has the extension, Horovod with NCCL, data of trainings, the programs that shape links, and a note with the commit,
since the GPU machine has no .git.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from laboratory import machine
from laboratory.cluster import network
from laboratory.gpu import stages
from laboratory.gpu.stages import Clock, Failed, Impossible, Record, Stage, marked
from laboratory.machine import ROOT

# What a GPU machine without a network has: Python, torch, and the architecture of an H100 or H200.
PYTHON, TORCH, ARCH = "3.12", "2.11.0", "90"

# The environment, builds and log of the preparation.
WORK = ROOT / "build" / "gpu-prepare"
VENV = WORK / "venv"
TOOLS = ("numpy", "pybind11", "ninja", "pytest", "hypothesis", "pytest-xdist", "Pillow")

# Bytes that may travel with a checkout, and seconds for everything.
MOST, LIMIT = 64 << 20, 3600.0

# The data of the trainings, which are packed as they are.
PICTURES, TEXT = "cifar10-25k.npz", "tinyshakespeare.txt"

# The programs that shape links, from a Debian package, and the libraries that every machine with a glibc has.
PROGRAMS, IPROUTE2 = ("ip", "tc"), "iproute2"
OF_GLIBC = ("ld-linux", "libc", "libdl", "libm", "libpthread", "librt")
STARTER = """#!/bin/sh
here=${{0%/*}}/lib
LD_LIBRARY_PATH="$here" exec "$here/{program}" "$@"
"""

EXTENSION = """
import json
from gradcomp.native import extension
print("@" + json.dumps({"cuda": extension.BUILT_WITH_CUDA, "file": extension.native.__file__}))
"""
HOROVOD = 'import json, horovod.torch as hvd; print("@" + json.dumps({"nccl": bool(hvd.nccl_built()), "file": hvd.__file__}))'
# What is used of a pack, and the program that tells whether it is.
PARTS = {"extension": EXTENSION, "horovod": HOROVOD, IPROUTE2: ""}
NCCL = "import nvidia.nccl; print(next(iter(nvidia.nccl.__path__)))"
SITE = "import sysconfig; print(sysconfig.get_path('platlib'))"


def prepare(data: Path | None) -> int:
    """Make the pack. Return 0, or 1 where a part failed or the pack is too large. A part that is left out says why."""
    shutil.rmtree(stages.PACK, ignore_errors=True)
    stages.PACK.mkdir(parents=True)
    WORK.mkdir(parents=True, exist_ok=True)
    parts = [
        [Stage("pictures", partial(copied, file=PICTURES, data=data), LIMIT)],
        [Stage("text", partial(copied, file=TEXT, data=data), LIMIT)],
        [Stage(IPROUTE2, programs, LIMIT)],
        [Stage("environment", environment, LIMIT, required=True)],
        [Stage("extension", extension, LIMIT)],
        [Stage("horovod", horovod, LIMIT)],
    ]
    records = stages.run(parts, LIMIT, WORK / "prepare.log", stages.environment(), stages.say)
    packed = [record["name"] for record in records if record["status"] == "ok" and record["name"] != "environment"]
    note = {"commit": machine.commit(), "sources": sources(), "arch": ARCH, "packed": packed}
    (stages.PACK / "note.json").write_text(json.dumps(note) + "\n")
    size = sum(path.stat().st_size for path in stages.PACK.rglob("*") if path.is_file())
    named = stages.PACK.relative_to(ROOT) if stages.PACK.is_relative_to(ROOT) else stages.PACK
    print(f"{named}: {size / 2**20:.1f} MiB of {MOST >> 20}, with the note and {', '.join(packed) or 'nothing else'}")
    if size > MOST:
        print("gpu_check: that is too much to travel; leave the pictures out", file=sys.stderr)
    return int(size > MOST or any(record["status"] == "failed" for record in records))


def sources() -> str:
    """Return a digest of all that the extension is compiled from."""
    found = hashlib.sha256()
    for path in sorted([*(ROOT / "csrc").rglob("*"), ROOT / "CMakeLists.txt"]):
        if path.is_file():
            found.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def copied(clock: Clock, file: str, data: Path | None) -> Record:
    """Pack the data of a training."""
    if data is None or not (data / file).is_file():
        raise Impossible(f"left out, and with it a training: name a folder that has {file} by --data")
    shutil.copy(data / file, stages.PACK)
    return {}


def programs(clock: Clock) -> Record:
    """Pack the programs that shape links, each with its libraries and a script that starts it with them."""
    packed = stages.PACK / IPROUTE2
    (packed / "lib").mkdir(parents=True)
    for name in PROGRAMS:
        if (found := network.find(name)) is None:
            shutil.rmtree(packed)
            raise Impossible(f"left out: {name} is missing; install the Debian package {IPROUTE2}")
        shutil.copy(found, packed / "lib" / name)
        libraries = re.findall(r"^\s*(\S+) => (/\S+)", clock.command(["ldd", found]), re.MULTILINE)
        for library, path in libraries:
            if library.partition(".")[0] not in OF_GLIBC:
                shutil.copy(path, packed / "lib" / library)
        (packed / name).write_text(STARTER.format(program=name))
    return {}


def environment(clock: Clock) -> Record:
    """Make an environment with the Python and the torch of the GPU machine."""
    if not (VENV / "bin" / "python").exists():
        clock.command([interpreter(), "-m", "venv", "--clear", VENV])
    command: list[str | Path] = [VENV / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    clock.command([*command, f"torch=={TORCH}", *TOOLS])
    return {}


def interpreter() -> str:
    """Find the Python that the environment is made of."""
    found = os.environ.get("PYTHON", f"python{PYTHON}")
    say = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        version = subprocess.run([found, "-c", say], capture_output=True, text=True, timeout=60).stdout.strip()
    except OSError:
        version = ""
    if version != PYTHON:
        raise Impossible(f"{found} is no Python {PYTHON}; name one in PYTHON. The extension and Horovod are left out")
    return found


def extension(clock: Clock) -> Record:
    """Compile the extension with kernels."""
    if stages.toolkit() is None:
        raise Impossible("left out: nvcc is missing; install a CUDA toolkit, or name its folder in CUDA_HOME")
    built = compiled(clock, VENV / "bin" / "python", WORK / "cmake", ARCH)
    packed = Path(shutil.copy(built, stages.PACK))
    clock.command(["strip", "--strip-unneeded", packed])
    return {"said": [f"{packed.name}, {packed.stat().st_size / 2**20:.1f} MiB"]}


def compiled(clock: Clock, python: str | Path, tree: Path, arch: str | None) -> Path:
    """Compile the extension for a Python in a folder of its own. arch: of its kernels; None: without kernels."""
    found = clock.command([python, "-c", "import pybind11; print(pybind11.get_cmake_dir())"]).strip().splitlines()[-1]
    options = [f"-DPython_EXECUTABLE={python}", f"-Dpybind11_DIR={found}"]
    options += ["-DGRADCOMP_CUDA=ON", f"-DGRADCOMP_CUDA_ARCHS={arch}"] if arch else ["-DGRADCOMP_CUDA=OFF"]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    clock.command(["cmake", *generator, "-S", ROOT, "-B", tree, *options])
    clock.command(["cmake", "--build", tree, "--parallel"])
    (built,) = tree.glob("_native*.so")
    return built


def horovod(clock: Clock) -> Record:
    """Build Horovod for that torch, with NCCL, by scripts/setup."""
    toolkit, python = stages.toolkit(), VENV / "bin" / "python"
    if toolkit is None:
        raise Impossible("left out: nvcc is missing; install a CUDA toolkit, or name its folder in CUDA_HOME")
    nccl = Path(clock.command([python, "-c", NCCL]).strip().splitlines()[-1])
    if not (nccl / "include" / "nccl.h").is_file():
        raise Impossible("left out: NCCL's headers are missing; install a torch for CUDA in the environment, which brings them")
    linked = WORK / "nccl"
    linked.mkdir(exist_ok=True)
    (linked / "libnccl.so").unlink(missing_ok=True)
    (linked / "libnccl.so").symlink_to(nccl / "lib" / "libnccl.so.2")
    clock.command(
        [ROOT / "scripts" / "setup", "--horovod"],
        VIRTUAL_ENV=str(VENV),
        CUDAARCHS=ARCH,
        HOROVOD_GPU_OPERATIONS="NCCL",
        HOROVOD_NCCL_LINK="SHARED",
        HOROVOD_NCCL_INCLUDE=str(nccl / "include"),
        HOROVOD_NCCL_LIB=str(linked),
        HOROVOD_CUDA_HOME=str(toolkit),
        HOROVOD_BUILD_CUDA_CC_LIST=ARCH,
    )
    site, packed = Path(clock.command([python, "-c", SITE]).strip().splitlines()[-1]), stages.PACK / "horovod"
    for folder in site.glob("horovod*"):
        shutil.copytree(folder, packed / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    clock.command(["strip", "--strip-unneeded", *packed.rglob("*.so")])
    size = sum(path.stat().st_size for path in packed.rglob("*") if path.is_file())
    return {"said": [f"{size / 2**20:.1f} MiB"]}


def install(clock: Clock, arch: str | None) -> tuple[list[str], list[str]]:
    """Copy the pack's parts beside the package of the check, if they import there.

    arch: of this GPU; None: there is none. Returns the parts, and a sentence for each that is not used.
    """
    note = stages.prepared()
    used, said = [], []
    for part in PARTS:
        if part not in note.get("packed", ()):
            continue
        copied: list[Path] = []
        try:
            if part == "extension":
                _check(note, arch)
            copied = _copied(part)
            _try(clock, part)
            used.append(part)
        except Failed as error:
            said.append(f"the prepared {part} is not used: {str(error).splitlines()[-1]}")
            for path in copied:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return used, said


def offer_programs() -> None:
    """Let this process, and those that it starts, find the programs of the pack where the machine has none."""
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:{stages.PACKAGE / 'bin'}"


def _try(clock: Clock, part: str) -> None:
    """Raise Failed if a part that was copied does not work here."""
    if part == IPROUTE2:
        for name in PROGRAMS:
            clock.command([stages.PACKAGE / "bin" / name, "-V"])
        return
    found = marked(clock.command([sys.executable, "-c", PARTS[part]], cwd=stages.BUILD))["file"]
    if stages.PACKAGE not in Path(found).parents:
        raise Failed(f"Python {platform.python_version()} imports another one, {found}")


def _check(note: Record, arch: str | None) -> None:
    if note["sources"] != sources():
        raise Failed("its sources have changed since; prepare it again")
    if arch not in (None, note["arch"]):
        raise Failed(f"it is for sm_{note['arch']}, and this GPU is sm_{arch}")


def _copied(part: str) -> list[Path]:
    """Copy a part of the pack. Return the copies."""
    if part == "extension":
        return [Path(shutil.copy(each, stages.PACKAGE / "gradcomp")) for each in stages.PACK.glob("_native*.so")]
    if part == IPROUTE2:
        there = Path(shutil.copytree(stages.PACK / part, stages.PACKAGE / "bin"))
        for path in there.rglob("*"):
            path.chmod(0o755)  # which may have been lost on the way
        return [there]
    return [Path(shutil.copytree(each, stages.PACKAGE / each.name)) for each in (stages.PACK / "horovod").iterdir()]
