"""scripts/setup, the real one, in a checkout of its own: refusals before any download, the first words, the choice of torch."""

from __future__ import annotations

import functools
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.checkout import REAL_PYTHON, Checkout

ROOT = Path(__file__).resolve().parents[2]
TAG = f"py{sys.version_info[0]}{sys.version_info[1]}"
LITTLE = 100


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_all_that_is_missing_is_said_at_once(checkout: Checkout) -> None:
    status, said = checkout.setup()
    sentence, line = said.splitlines()
    assert status == 1 and checkout.untouched()
    assert sentence.startswith("setup: missing on this machine: Python 3.10 or newer")
    assert "a C++20 compiler (c++ is not a program" in sentence and sentence.endswith("CMake")
    assert line == "setup: as root, run: apt-get install python3 python3-venv python3-dev g++ cmake"


def test_missing_parts_of_python_have_debians_names(checkout: Checkout) -> None:
    checkout.has_all()
    parts = f'case "$*" in *ensurepip*) exit 1 ;; *get_path*) echo /nowhere; exit ;; esac\nexec {REAL_PYTHON} "$@"'
    checkout.has("python3", parts)
    assert checkout.setup()[1].endswith("apt-get install python3-venv python3-dev\n")
    version = f"python3.{sys.version_info[1]}"
    checkout.has(version, parts)
    checkout.variables["PYTHON"] = version
    assert checkout.setup()[1].endswith(f"apt-get install {version}-venv {version}-dev\n")
    assert not (checkout.bin / version).is_symlink()  # or the system's own Python would now be the stand-in
    assert checkout.untouched()


LITTLE_DISK = f"printf 'header\\n/dev/x 1 1 {LITTLE} 1%% /\\n'"


@pytest.mark.parametrize(
    ("programs", "variables", "said"),
    [
        (
            {"python3": 'case "$1" in -V) echo Python 3.9.2 ;; *) exit 1 ;; esac', "cmake": "echo cmake version 3.18.4"},
            {},
            [
                "Python 3.10 or newer (python3 is Python 3.9.2; PYTHON names another)",
                "CMake 3.22 or newer (cmake version 3.18.4;",
            ],
        ),
        ({}, {"CXX": "clang++-77"}, ["not a program; CXX names another)\nsetup: as root, run: apt-get install clang-77\n"]),
        (
            {"old-g++": "echo \"error: unrecognized command-line option '-std=c++20'\" >&2; exit 1"},
            {"CXX": "old-g++"},
            ["CXX=old-g++ fails: error: unrecognized", "\nsetup: unset CXX, too, or let it name a compiler that works\n"],
        ),
        (
            {"old-g++": 'case "$*" in *probe.so*) echo "cannot find -lstdc++" >&2; exit 1 ;; esac'},
            {"CXX": "old-g++"},
            ["CXX=old-g++ fails: cannot find -lstdc++", "install g++\n"],
        ),
        ({"old-g++": "exit 1"}, {"CXX": "old-g++"}, ["CXX=old-g++ fails: it says nothing"]),
        (
            {"nvcc": 'echo "error: #error -- unsupported GNU version!" >&2; exit 1'},
            {},
            ["nvcc fails with CXX=c++ (error: #error -- unsupported GNU version!)", "CUDAHOSTCXX"],
        ),
        (
            {"nvcc": "exit 1", "df": LITTLE_DISK},
            {"GRADCOMP_CUDA": "OFF"},
            [f"too little disk: / has {LITTLE} MB free, and 2300 MB are needed"],
        ),
    ],
)
def test_a_machine_that_will_not_do_is_refused_before_anything_is_made(
    programs: dict[str, str], variables: dict[str, str], said: list[str], checkout: Checkout
) -> None:
    checkout.has_all()
    for name, text in programs.items():
        checkout.has(name, text)
    checkout.variables |= variables
    status, heard = checkout.setup()
    assert status == 1 and checkout.untouched()
    assert all(part in heard for part in said), heard


def test_odd_places_are_named_or_do_no_harm(checkout: Checkout) -> None:
    """A TMPDIR with a quote in its name, none where TMPDIR leads, and no HOME: the system knows it."""
    folder = checkout.root / "it's scratch"
    folder.mkdir()
    checkout.variables["TMPDIR"] = str(folder)
    checkout.has_home = False
    status, said = checkout.setup()
    assert status == 1 and len(said.splitlines()) == 2 and not list(folder.iterdir())
    assert said.startswith("setup: missing on this machine: Python 3.10 or newer")
    checkout.variables["TMPDIR"] = str(checkout.root / "none")
    assert checkout.setup() == (1, f"setup: TMPDIR={checkout.root / 'none'} is not a folder; make it, or unset TMPDIR\n")


class Index:
    """A package index on loopback: simple pages over a folder of wheels."""

    def __init__(self, folder: Path):
        self.folder = folder
        handler = functools.partial(QuietHandler, directory=str(folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def wheel(self, name: str, version: str, tag: str, megabytes: int, needs: str = "") -> None:
        file = f"{name}-{version}-{tag}.whl"
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(folder / file, "w") as archive:
            archive.writestr(f"{name}/ballast", bytes(megabytes * 1_000_000))
            requirement = f"Requires-Dist: {needs}\n" if needs else ""
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirement}")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        links = "".join(f'<a href="{path.name.replace("+", "%2B")}">{path.name}</a>\n' for path in folder.glob("*.whl"))
        (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(tmp_path / "index")
    yield made
    made.close()


def chosen(index_url: str, pip_index: str) -> tuple[str, str]:
    """The choice between an index of CPU builds and pip's own index, for torch 99.0: its line, and what is said."""
    variables = {**os.environ, "PIP_INDEX_URL": pip_index, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    words = [sys.executable, str(ROOT / "scripts" / "setting_up" / "choose_torch.py"), "99.0", index_url]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip(), done.stderr


def test_an_index_of_cpu_builds_that_answers_is_taken(index: Index, tmp_path: Path) -> None:
    index.wheel("torch", "98.0+cpu", "py3-none-any", 1)
    index.wheel("torch", "99.0+cpu", "cp27-cp27m-manylinux1_x86_64", 1)
    index.wheel("torch", "99.0+cpu", f"{TAG}-none-any", 3)
    line, said = chosen(index.url, index.url)
    assert line == f"3 torch==99.0+cpu numpy --extra-index-url {index.url}"
    assert said == f"setup: this machine has no GPU, so that torch is the CPU build of {index.url}\n"
    # pip, given this line, installs that wheel: numpy is not on this index, and the test leaves it out.
    arguments = [word for word in line.split()[1:] if word != "numpy"]
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--target", tmp_path / "here", "--index-url", index.url]
    subprocess.run(
        [*words, *arguments],
        check=True,
        env={**os.environ, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull},
    )
    assert (tmp_path / "here" / "torch-99.0+cpu.dist-info").is_dir()


def test_without_a_cpu_build_pips_own_torch_is_taken_and_its_whole_size_said(index: Index) -> None:
    """Whether the index has nothing for this Python, or does not answer."""
    index.wheel("torch", "99.0+cpu", "cp27-cp27m-manylinux1_x86_64", 1)
    index.wheel("torch", "99.0", "py3-none-any", 3, needs="cudastuff==1")
    index.wheel("cudastuff", "1", "py3-none-any", 4)
    other = Index(index.folder.with_name("other"))
    other.wheel("torch", "99.0+cpu", "cp27-cp27m-manylinux1_x86_64", 1)
    line, said = chosen(other.url, index.url)
    assert line == "7 torch==99.0 numpy" and "has no torch 99.0 for Python" in said and "is 7 MB with all it needs" in said
    other.close()
    line, said = chosen(other.url, index.url)
    assert line == "7 torch==99.0 numpy" and f"no CPU build of torch from {other.url}: it does not answer" in said


def test_an_index_that_is_silent_is_not_waited_for(index: Index) -> None:
    index.wheel("torch", "99.0", "py3-none-any", 3)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        line, said = chosen(f"http://127.0.0.1:{server.getsockname()[1]}", index.url)
    assert line == "3 torch==99.0 numpy" and "it does not answer: timed out" in said
    assert time.monotonic() - began < 30  # far less than what pip would wait


def test_setup_says_what_it_will_take_and_gives_pip_the_chosen_torch(checkout: Checkout, index: Index) -> None:
    index.wheel("torch", "2.13.0+cpu", f"{TAG}-none-any", 2)
    checkout.has_all()
    checkout.has_environment()
    checkout.variables |= {"GRADCOMP_TORCH_INDEX": index.url, "PIP_INDEX_URL": index.url}
    status, said = checkout.setup()
    assert status == 1
    assert "min of compiling on" in said and "MB to fetch" in said and "MB of disk" in said
    asked = (checkout.root / "asked").read_text()
    assert asked.endswith(f" torch==2.13.0+cpu numpy --extra-index-url {index.url}\n")


def test_a_torch_that_was_named_and_a_gpu_leave_the_index_alone(checkout: Checkout, index: Index) -> None:
    checkout.has_all()
    checkout.has_environment()
    index.wheel("torch", "2.13.0+cpu", f"{TAG}-none-any", 2)
    checkout.variables |= {"GRADCOMP_TORCH_INDEX": index.url, "GRADCOMP_TORCH": "torch==2.12 --index-url https://example.org"}
    assert "CPU build" not in checkout.setup()[1]
    assert (checkout.root / "asked").read_text().endswith(" torch==2.12 --index-url https://example.org numpy\n")
    del checkout.variables["GRADCOMP_TORCH"]
    checkout.has("nvidia-smi", "exit 0")
    assert "CPU build" not in checkout.setup()[1]
    assert (checkout.root / "asked").read_text().endswith(" torch==2.13.0 numpy\n")


def test_a_torch_that_does_not_fit_on_the_disk_is_not_fetched(checkout: Checkout, index: Index) -> None:
    index.wheel("torch", "2.13.0+cpu", f"{TAG}-none-any", 500)
    checkout.has_all()
    checkout.has_environment()
    checkout.has("df", "printf 'header\\n/dev/x 1 1 3000 1%% /\\n'")
    checkout.variables |= {"GRADCOMP_TORCH_INDEX": index.url, "PIP_INDEX_URL": index.url}
    assert "too little disk: / has 3000 MB free" in checkout.setup()[1]
    assert not (checkout.root / "asked").exists()
