"""Hands the build of the extension to CMake (with Ninja); everything else about the package stands in pyproject.toml."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


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
        # A directory of its own for each Python, kept between builds: only what changed is compiled again.
        tree = ROOT / "build" / f"cmake-{sysconfig.get_config_var('SOABI')}"
        configure = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_MAKE_PROGRAM={find_ninja()}",
            f"-DGRADCOMP_CUDA={os.environ.get('GRADCOMP_CUDA', 'AUTO')}",
            f"-DGRADCOMP_CUDA_ARCHS={os.environ.get('GRADCOMP_CUDA_ARCHS', '')}",
        ]
        if shutil.which("cmake") is None:
            raise SystemExit("gradcomp is built with CMake: apt-get install cmake, or pip install cmake")
        forget_other_compiler(tree)
        subprocess.run(["cmake", "-G", "Ninja", "-S", ROOT, "-B", tree, *configure], check=True)
        subprocess.run(["cmake", "--build", tree], check=True)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Replaced, not overwritten: a running process may have the old file mapped.
        fresh = target.with_suffix(f".{os.getpid()}")
        shutil.copyfile(tree / target.name, fresh)
        fresh.replace(target)


setup(ext_modules=[Extension("gradcomp._native", sources=[])], cmdclass={"build_ext": CMakeBuild})
