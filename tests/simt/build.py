"""Builds what tests need when something that it is made of has changed: the emulator, and the extension with other flags."""

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all"


def compiler() -> str:
    """Return the compiler: CXX, or g++ where CXX is Clang: it calls other functions before an access than hooks.cpp has."""
    named = os.environ.get("CXX") or "c++"
    if "clang" in subprocess.run([named, "--version"], capture_output=True, text=True).stdout:
        named = "g++"
    found = shutil.which(named)
    if found is None:
        raise RuntimeError(f"the emulator is built with {named}, which is not a program here: apt-get install g++")
    return found


def build(sanitize: bool = False) -> Path:
    """Build the emulator's modules, gradcomp_simt and simt_selftest, and return their folder."""
    options = [f"-DGRADCOMP_SANITIZE={'ON' if sanitize else 'OFF'}"]
    return cmake(ROOT / "tests" / "simt", "simt-asan" if sanitize else "simt", compiler(), options)


def extension(name: str, kind: str, flags: str) -> Path:
    """Build gradcomp's extension for CPUs with these flags in build/NAME, and return the module."""
    options = ["-DGRADCOMP_CUDA=OFF", f"-DCMAKE_BUILD_TYPE={kind}", f"-DCMAKE_CXX_FLAGS={flags}"]
    return cmake(ROOT, name, compiler(), options) / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


def cmake(source: Path, name: str, chosen: str, options: Sequence[str]) -> Path:
    """Build a project in build/NAME, and return that folder, at once if it is up to date. One process builds, others wait."""
    import pybind11

    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    configure = ["cmake", "-S", str(source), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += ["-DPYBIND11_FINDPYTHON=ON", f"-DCMAKE_CXX_COMPILER={chosen}", *options]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        note = folder / "compiler.txt"
        if not note.is_file() or note.read_text() != chosen:
            # CMake's cache would keep the compiler of the last time.
            (folder / "CMakeCache.txt").unlink(missing_ok=True)
            shutil.rmtree(folder / "CMakeFiles", ignore_errors=True)
            note.write_text(chosen)
        for command in (configure, ["cmake", "--build", str(folder)]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return folder


if __name__ == "__main__":
    if "--extension" in sys.argv[1:]:  # for the fuzzer
        print(extension("native-asan", "None", SANITIZERS))
    else:
        print(build(sanitize="--sanitize" in sys.argv[1:]))
