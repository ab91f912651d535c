"""What is built, and from what: Horovod's patched sources, the compiler that CMake uses, the checkout that Python imports."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from setting_up import horovod_patches
from setting_up.horovod_patches import PATCHES

ROOT = Path(__file__).resolve().parents[2]


def made_up(folder: Path) -> Path:
    """Sources that hold every patched passage, and nothing else."""
    for patch in PATCHES:
        path = folder / patch.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + patch.passage + "\n")
    return folder


def test_every_patch_is_applied_and_gives_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert horovod_patches.main([str(made_up(tmp_path))]) == 0
    said = capsys.readouterr().out
    for patch in PATCHES:
        assert patch.replacement in (tmp_path / patch.file).read_text()
        assert f"patched {patch.file}: {patch.reason}\n" in said and "\n" not in patch.reason


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.file)
@pytest.mark.parametrize("times", [0, 2])
def test_a_passage_that_is_not_there_once_fails_loudly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], patch: horovod_patches.Patch, times: int
) -> None:
    path = made_up(tmp_path) / patch.file
    path.write_text(path.read_text().replace(patch.passage, patch.passage * times))
    before = {other.file: (tmp_path / other.file).read_text() for other in PATCHES}
    assert horovod_patches.main([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert (
        said.startswith("error: the patches do not fit") and f"{patch.file} has {patch.passage.strip()!r} {times} times" in said
    )
    assert before == {other.file: (tmp_path / other.file).read_text() for other in PATCHES}


@pytest.fixture(scope="module")
def horovod_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources that set-up patches, from the package index."""
    folder = tmp_path_factory.mktemp("horovod")
    words = ["download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "horovod", "-d", ".", "horovod==0.28.1"]
    done = subprocess.run([sys.executable, "-m", "pip", *words], cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"Horovod's real sources were NOT patched: pip cannot fetch them: {done.stderr.strip()[-200:]}")
    subprocess.run(["tar", "xzf", "horovod-0.28.1.tar.gz"], cwd=folder, check=True)
    return folder / "horovod-0.28.1"


def compiles(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("c++")
    assert compiler is not None
    words = [
        compiler,
        "-std=c++20",
        "-fsyntax-only",
        "-x",
        "c++",
        "-",
        f"-I{folder}",
        f"-I{folder}/third_party/flatbuffers/include",
    ]
    return subprocess.run(words, input=text, capture_output=True, text=True)


@pytest.mark.slow
def test_the_patches_fit_the_real_sources_and_mend_them(horovod_sources: Path) -> None:
    assigns = (
        "#include <flatbuffers/stl_emulation.h>\nvoid assign(flatbuffers::span<int>& a, flatbuffers::span<int>& b) { a = b; }\n"
    )
    includes = '#include <cstddef>\n#include "horovod/common/group_table.h"\n'
    refused = compiles(horovod_sources, assigns)
    assert refused.returncode != 0 and "count_" in refused.stderr
    horovod_patches.apply(horovod_sources)
    for text in (assigns, includes):
        done = compiles(horovod_sources, text)
        assert done.returncode == 0 and "-Wreturn-type" not in done.stderr, done.stderr


# A package that is built with gradcomp's own setup.py, and whose module takes a moment to compile.
TINY = """cmake_minimum_required(VERSION 3.22)
project(gradcomp LANGUAGES CXX)
set(GRADCOMP_CUDA_IMAGES 0 CACHE INTERNAL "")
add_library(_native MODULE native.cpp)
set_target_properties(_native PROPERTIES PREFIX "" OUTPUT_NAME "_native" SUFFIX ".${SUFFIX}")
"""


@pytest.mark.slow
def test_another_compiler_is_not_ignored_by_an_earlier_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX")).lstrip(".")
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "gradcomp").mkdir()
    (tmp_path / "gradcomp" / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "gradcomp"\nversion = "0"\n[tool.setuptools]\npackages = ["gradcomp"]\n'
    )
    (tmp_path / "CMakeLists.txt").write_text(TINY.replace("${SUFFIX}", suffix))
    (tmp_path / "native.cpp").write_text("int nothing;\n")
    compiler = shutil.which("c++")
    for name in ("one", "other"):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/{name}.called\nexec {compiler} "$@"\n')
        path.chmod(0o755)

    def build(name: str) -> str:
        monkeypatch.setenv("CXX", str(tmp_path / name))
        called = tmp_path / f"{name}.called"
        called.unlink(missing_ok=True)
        words = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
        return called.read_text() if called.exists() else ""

    assert "native.cpp" in build("one")
    assert "native.cpp" not in build("one")  # nothing has changed
    assert "native.cpp" in build("other")


def test_a_checkout_named_gradcomp_beside_a_script_does_not_hide_the_package(tmp_path: Path) -> None:
    """Python takes a folder of that name for a package without content, where nothing on its path has a better one."""
    if any(name.startswith("__editable__") for name in sys.modules):
        pytest.skip("a script beside the checkout was NOT run: gradcomp is not installed by scripts/setup")
    (tmp_path / "gradcomp").symlink_to(ROOT)
    (tmp_path / "train.py").write_text("import gradcomp\nprint(gradcomp.__file__, len(gradcomp.names()))\n")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file, names = done.stdout.split()
    assert Path(file).parts[-2:] == ("gradcomp", "__init__.py") and int(names) > 10


def test_a_changed_patch_makes_another_wheel_of_horovod_and_another_note(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts" / "setting_up", tmp_path / "scripts" / "setting_up")
    script = f"""set -euo pipefail
        ROOT={tmp_path} HOROVOD=1 torch=2 python={sys.executable} CXX=c++ options=
        . "$ROOT/scripts/setting_up/horovod.sh"
        horovod_key
        horovod_note"""

    def told() -> list[str]:
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    before = told()
    assert told() == before and len(before) == 2
    with (tmp_path / "scripts" / "setting_up" / "horovod_patches.py").open("a") as patches:
        patches.write("# changed\n")
    assert not set(told()) & set(before)


def test_one_version_of_torch_is_named_everywhere() -> None:
    named = {}
    for file in [*(path for path in (ROOT / "scripts").iterdir() if path.is_file()), *(ROOT / "docker").glob("*.Dockerfile")]:
        named |= {file.name: set(re.findall(r"(?:torch==|TORCH_VERSION=)([0-9.]+)", file.read_text()))}
    found = {name: versions for name, versions in named.items() if versions}
    assert set(found) == {"lib.sh", "cpu.Dockerfile", "cuda.Dockerfile"} and len(set.union(*found.values())) == 1
