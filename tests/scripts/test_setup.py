"""scripts/setup, the real one, in a checkout of its own: refusals before any download, the first words, the choice of torch."""

from __future__ import annotations

import functools
import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.checkout import REAL_PYTHON, ROOT, Checkout, program

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


NEEDED = "python3 python3-venv python3-dev g++ cmake"
APT_GET = 'echo "$*" >>{root}/apt'


@pytest.mark.parametrize(
    ("programs", "packages"),
    [
        ({"id": "echo 0", "apt-get": APT_GET}, f"{NEEDED} iproute2"),
        ({"sudo": '[ "$1" = -n ] && shift && exec "$@"', "apt-get": APT_GET}, f"{NEEDED} iproute2"),
        ({"id": "echo 0", "apt-get": APT_GET, "tc": ""}, NEEDED),
        ({"sudo": "exit 1", "apt-get": APT_GET}, None),  # it would ask for a password
        ({"id": "echo 0"}, None),
    ],
    ids=["root", "sudo", "root, iproute2 there", "sudo with a password", "no apt-get"],
)
def test_root_and_sudo_without_a_password_get_the_packages_installed(
    programs: dict[str, str], packages: str | None, checkout: Checkout
) -> None:
    for name, text in programs.items():
        checkout.has(name, text.format(root=checkout.root))
    status, said = checkout.setup("--ddp")
    assert status == 1 and said.startswith("setup: missing on this machine: Python 3.10 or newer")
    if packages is None:
        assert said.endswith(f"\nsetup: as root, run: apt-get install {NEEDED}\n") and not (checkout.root / "apt").exists()
        return
    assert f"\nsetup: installs with apt-get: {packages}\n" in said
    update, *installs = (checkout.root / "apt").read_text().splitlines()
    installed = " ".join(each.removeprefix("install --yes --no-install-recommends ") for each in installs)
    assert update == "update" and installed == packages
    # The stand-in brought nothing: that is found, and not tried again.
    assert said.endswith(f"\nsetup: as root, run: apt-get install {NEEDED}\n")


def test_root_gets_iproute2_for_the_demo_but_nothing_stops_without_it(ready: Checkout) -> None:
    ready.has("id", "echo 0")
    ready.has("apt-get", f"echo $* >>{ready.root}/apt; exit 100")
    said = ready.setup("--ddp")[1]
    assert "setup: installs with apt-get: iproute2\n" in said and "updating pip" in said
    assert "iproute2" in (ready.root / "apt").read_text()
    (ready.root / "apt").unlink()
    ready.setup("--install")
    assert not (ready.root / "apt").exists(), "an installation for use has no need of it"


def test_a_need_that_no_package_meets_is_said_before_packages_are_installed(checkout: Checkout) -> None:
    checkout.has("id", "echo 0")
    checkout.has("apt-get", f"touch {checkout.root}/apt")
    checkout.has("python3", 'case "$1" in -V) echo Python 3.9.2 ;; *) exit 1 ;; esac')
    status, said = checkout.setup()
    assert status == 1 and "python3 is Python 3.9.2" in said and not (checkout.root / "apt").exists()


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
        ({"old-g++": "exit 1"}, {"CXX": "old-g++"}, ["CXX=old-g++ fails: it says nothing", "install g++\n"]),
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


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[str, Callable[..., None]]]:
    """Serve a package index on loopback. Yield its address, and a function that lists versions of torch, each with a tag."""
    folder = tmp_path / "index" / "torch"
    folder.mkdir(parents=True)

    def has(*versions: str) -> None:
        files = [f"torch-{version}.whl" for version in versions]
        (folder / "index.html").write_text("".join(f'<a href="{name.replace("+", "%2B")}">{name}</a>\n' for name in files))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", has
    server.shutdown()
    server.server_close()


Served = tuple[str, Callable[..., None]]


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    """A checkout on a machine that has all but torch."""
    checkout.has_all()
    checkout.has_environment()
    return checkout


def asked(checkout: Checkout) -> str:
    """Return what pip was to install last."""
    return (checkout.root / "asked").read_text().splitlines()[-1].partition(" raw ")[2]


def test_setup_says_what_it_will_take_and_takes_a_cpu_build_where_the_index_has_one(ready: Checkout, index: Served) -> None:
    url, has = index
    has("2.12.0+cpu-py3-none-any", f"2.13.0+cpu-{TAG}-none-any")
    ready.variables |= {"GRADCOMP_TORCH_INDEX": url}
    status, said = ready.setup()
    assert status == 1 and asked(ready) == f"torch==2.13.0+cpu numpy --extra-index-url {url}"
    assert f"setup: this machine has no GPU, so that torch is the CPU build of {url}\n" in said
    plan, work = said.split("updating pip")
    assert (
        f"installs torch 2.13.0, build tools, Horovod 0.28.1, gradcomp into {ready.root}/.venv" in plan
        and "min of compiling on" in plan
    )
    sizes = re.search(r"(\d+) MB to fetch, (\d+) MB of disk; (\d+) and (\d+) if .* CUDA", plan)
    assert sizes and "MB to fetch" not in work
    fetched, disk, most_fetched, most_disk = map(int, sizes.groups())
    assert fetched < 500 and disk < 2500 and most_fetched > 2800 and most_disk > 5000


def test_a_pip_that_could_not_be_updated_is_updated_by_the_next_run(ready: Checkout, index: Served) -> None:
    url, has = index
    has(f"2.13.0+cpu-{TAG}-none-any")
    ready.variables |= {"GRADCOMP_TORCH_INDEX": url}
    (ready.root / "offline").touch()
    status, said = ready.setup()
    assert status == 1 and "updating pip failed" in said and not (ready.root / "asked").exists()
    (ready.root / "offline").unlink()
    assert ready.setup()[0] == 1 and (ready.root / "updated").exists() and asked(ready).startswith("torch==2.13.0+cpu")


@pytest.mark.parametrize(
    ("line", "unreached"),
    [
        ("WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'SSLError(...)': /torch/", True),
        ("WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by 'SSLError(...)': /torch/", False),
        ("Could not fetch URL https://pypi.org/simple/torch/: a problem confirming the ssl certificate - skipping", True),
    ],
)
def test_a_failed_connection_is_not_a_missing_version(line: str, unreached: bool, ready: Checkout) -> None:
    ready.has("nvidia-smi", "exit 0")
    missing = "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)"
    (ready.root / "heard").write_text(f"{line}\n{missing}\n")
    *_, last = ready.setup()[1].splitlines()
    assert "installing torch==2.13.0 failed after" in last
    assert (f"pip cannot reach its index ({line})" in last) == ("PIP_CERT" in last) == unreached


def test_packages_are_counted_while_pip_unpacks_them(tmp_path: Path) -> None:
    def shown(*installed: str) -> str:
        for name in installed:
            (tmp_path / "lib" / "python3.13" / "site-packages" / f"{name}-1.0.dist-info").mkdir(parents=True)
        script = f". {ROOT}/scripts/lib.sh; prefix={tmp_path} last_step {tmp_path}/log 60"
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout

    shown("old")
    time.sleep(0.05)
    (tmp_path / "log").write_text("Downloading one.whl\nInstalling collected packages: first, nvidia-second, torch\n")
    time.sleep(0.05)
    assert shown() == "Installing package 1 of 3: first\n"
    assert shown("first", "nvidia_second") == "Installing package 3 of 3: torch\n"
    assert shown("torch") == "Installing package 3 of 3: torch\n"  # its programs come last


def test_memory_limits_how_many_compilers_run_at_once(checkout: Checkout) -> None:
    """A file with torch's headers takes 1.5 GB."""

    def compilers(cores: int) -> int:
        checkout.has("nproc", f"echo {cores}")
        script = f". {ROOT}/scripts/setting_up/needs.sh; compilers"
        return int(subprocess.check_output(["bash", "-c", script], env={"PATH": str(checkout.bin)}))

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    assert compilers(1) == 1 and 1 <= compilers(10_000) <= max(1, memory / 1.5)
    checkout.has("cat", f"echo {2**31}")  # a container's limit
    assert compilers(10_000) == 1


def test_a_bare_machines_demo_shows_ddp_before_horovod_is_built(checkout: Checkout) -> None:
    said, horovod = checkout.root / "said", checkout.root / "horovod"
    program(checkout.root / "scripts" / "setup", f'echo "setup $*" >>{said}; [ "$*" = --ddp ] || touch {horovod}')
    python = f'case "$*" in *find_spec*) [ -e {horovod} ] ;; *) echo "$*" >>{said} ;; esac'
    program(checkout.root / ".venv" / "bin" / "python", python)

    def demo(*options: str) -> list[str]:
        said.unlink(missing_ok=True)
        words = ["bash", str(checkout.root / "scripts" / "demo"), *options]
        subprocess.run(words, env={"PATH": str(checkout.bin)}, check=True, capture_output=True)
        return said.read_text().splitlines()

    own = ["setup --demo", "-m laboratory.demo"]
    assert demo("--ddp") == ["setup --ddp", "-m laboratory.demo --ddp"]
    assert demo() == ["setup --ddp", "-m laboratory.demo --ddp --out demo-results/ddp", *own]
    assert demo() == own, "Horovod is there"


def test_without_a_cpu_build_pips_own_torch_is_taken(ready: Checkout, index: Served) -> None:
    """The index has none of this version for this Python, does not answer, or is silent, and is then not waited for."""
    url, has = index
    has("2.12.0+cpu-py3-none-any", "2.13.0+cpu-cp27-cp27m-manylinux1_x86_64")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for address in (url, "http://127.0.0.1:9", f"http://127.0.0.1:{silent.getsockname()[1]}"):
            ready.variables |= {"GRADCOMP_TORCH_INDEX": address}
            began = time.monotonic()
            said = ready.setup()[1]
            assert asked(ready) == "torch==2.13.0 numpy" and f"setup: {address} does not answer, or has no CPU build" in said
            assert time.monotonic() - began < 30  # far less than what pip would wait


def test_a_torch_that_was_named_and_a_gpu_leave_the_index_alone(ready: Checkout, index: Served) -> None:
    url, has = index
    has(f"2.13.0+cpu-{TAG}-none-any")
    ready.variables |= {"GRADCOMP_TORCH_INDEX": url, "GRADCOMP_TORCH": "torch==2.12 --index-url https://example.org"}
    assert "CPU build" not in ready.setup()[1]
    assert asked(ready) == "torch==2.12 --index-url https://example.org numpy"
    del ready.variables["GRADCOMP_TORCH"]
    ready.has("nvidia-smi", "exit 0")
    assert "CPU build" not in ready.setup()[1]
    assert asked(ready) == "torch==2.13.0 numpy"


def test_a_torch_that_does_not_fit_on_the_disk_is_not_fetched(ready: Checkout) -> None:
    ready.has("nvidia-smi", "exit 0")
    ready.has("df", "printf 'header\\n/dev/x 1 1 3000 1%% /\\n'")
    assert "too little disk: / has 3000 MB free" in ready.setup()[1]
    assert not (ready.root / "asked").exists()
