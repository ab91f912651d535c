"""Hands the build of the extension to CMake (with Ninja) and tells how it goes; all else stands in pyproject.toml."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TextIO

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

# Seconds of one core for a C++ file, and for a CUDA file for one architecture (AMD EPYC, GCC 12, nvcc 13).
SECONDS_OF_CXX, SECONDS_OF_CUDA = 3.5, 5.5

# Seconds between two lines about the progress.
PATIENCE = 10


def terminal_behind_pip() -> TextIO | None:
    """The user's terminal, where pip hides a build's output from it: in the foreground, without -v."""
    try:
        asked = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
        if not any(re.fullmatch(r"pip[\d.]*", Path(word).name) for word in asked):
            return None
        if any(re.fullmatch(r"-v+|--verbose", word) for word in asked):
            return None
        terminal = Path("/dev/tty").open("w")  # noqa: SIM115 # open as long as the build runs
        if os.tcgetpgrp(terminal.fileno()) == os.getpgrp():
            return terminal
        terminal.close()
    except OSError:
        pass
    return None


def find_ninja() -> str:
    """The ninja of the build environment, else the system's."""
    try:
        import ninja
    except ImportError:
        found = shutil.which("ninja")
    else:
        found = str(Path(ninja.BIN_DIR) / "ninja")
    if found is None:
        raise SystemExit("gradcomp is built with Ninja: pip install ninja")
    return found


def compiler() -> str:
    """Name the compiler by what CXX names, where that leads to, and its version."""
    found = shutil.which(os.environ.get("CXX") or "c++")
    if found is None:
        return ""
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
    return f"{found} {os.path.realpath(found)} {version} {os.environ.get('CUDAHOSTCXX')} {os.environ.get('CUDACXX')}"


def forget_other_compiler(tree: Path) -> None:
    """Make CMake configure anew if the compiler is another than the last time: its cache would keep the old one."""
    note, now = tree / "compiler.txt", compiler()
    if not note.is_file() or note.read_text() != now:
        (tree / "CMakeCache.txt").unlink(missing_ok=True)
        shutil.rmtree(tree / "CMakeFiles", ignore_errors=True)
        tree.mkdir(parents=True, exist_ok=True)
        note.write_text(now)


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11  # a build needs it; an sdist and the metadata do not

        # A directory of its own for each Python, kept between builds: only what changed is compiled again.
        tree = ROOT / "build" / f"cmake-{sysconfig.get_config_var('SOABI')}"
        self.terminal = terminal_behind_pip()
        if shutil.which("cmake") is None:
            raise SystemExit("gradcomp is built with CMake: apt-get install cmake, or pip install cmake")
        forget_other_compiler(tree)
        self.configure(
            tree,
            [
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
                f"-DCMAKE_MAKE_PROGRAM={find_ninja()}",
                f"-DGRADCOMP_CUDA={os.environ.get('GRADCOMP_CUDA') or 'AUTO'}",
                f"-DGRADCOMP_PORTABLE={'ON' if os.environ.get('GRADCOMP_PORTABLE') == '1' else 'OFF'}",
                f"-DGRADCOMP_CUDA_ARCHS={os.environ.get('GRADCOMP_CUDA_ARCHS', '')}",
            ],
        )
        self.compile(tree)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Replaced, not overwritten: a running process may have the old file mapped.
        fresh = target.with_suffix(f".{os.getpid()}")
        shutil.copyfile(tree / target.name, fresh)
        fresh.replace(target)

    def say(self, text: str) -> None:
        """Tell the user, who sees it in the build's output or, where pip hides that, on the terminal."""
        print(f"gradcomp: {text}", flush=True)
        if self.terminal:
            print(f"\r\n  gradcomp: {text}", end="\r\n", file=self.terminal, flush=True)

    def configure(self, tree: Path, options: list[str]) -> None:
        """Have CMake choose the compilers and the GPUs; CMakeLists.txt says which, and why."""
        command = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(tree), *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as cmake:
            assert cmake.stdout is not None
            for line in cmake.stdout:
                print(line, end="", flush=True)
                if self.terminal and line.startswith("-- gradcomp: "):
                    print(f"\r\n  {line[3:].strip()}", end="", file=self.terminal, flush=True)
        if cmake.returncode:
            raise SystemExit("gradcomp: CMake did not configure the build; its message above says why")

    def compile(self, tree: Path) -> None:
        """Compile, with a word on how long it takes, and one every ten seconds on how far it is."""
        images = int(re.findall(r"^GRADCOMP_CUDA_IMAGES:\w+=(\d+)", (tree / "CMakeCache.txt").read_text(), re.MULTILINE)[0])
        cpu, cuda = (len(list((ROOT / "csrc").rglob(pattern))) for pattern in ("*.cpp", "*.cu"))
        cores = len(os.sched_getaffinity(0))
        seconds = (cpu * SECONDS_OF_CXX + cuda * images * SECONDS_OF_CUDA) / cores
        time_said = f"{seconds / 60:.0f} minutes" if seconds > 100 else f"{max(round(seconds, -1), 10):.0f} seconds"
        files = f"{cpu} C++ files" + (f", and {cuda} CUDA files for {images} GPU architecture(s)" if images else "")
        again = (tree / ".ninja_log").exists()
        self.say(f"compiling {files} on {cores} cores, " + ("only where changed" if again else f"about {time_said}"))
        began = said = time.monotonic()
        with subprocess.Popen(["cmake", "--build", str(tree)], stdout=subprocess.PIPE, text=True) as ninja:
            assert ninja.stdout is not None
            for line in ninja.stdout:
                print(line, end="", flush=True)
                step = re.match(r"\[(\d+)/(\d+)\]", line)
                if step and time.monotonic() - said >= PATIENCE:
                    said = time.monotonic()
                    self.say(f"step {step[1]} of {step[2]} after {said - began:.0f} s")
        if ninja.returncode:
            raise SystemExit("gradcomp: a file did not compile; the compiler's message is above")
        self.say(f"compiled in {time.monotonic() - began:.0f} s")


setup(
    ext_modules=[Extension("gradcomp._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    # pip fetches CMake for the build where the machine has none.
    setup_requires=[] if shutil.which("cmake") else ["cmake>=3.22"],
)
