"""The examples as files, and the commands of their page, run as they stand there by the real launchers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "examples" / "README.md").read_text()
ROWS = re.findall(r"^\| \[(\S+\.py)\]\(\1\) \| [^|]+ \| `([^`]+)` \|$", PAGE, re.MULTILINE)
# Lines that an example cannot do without, whatever else it says.
SAYS = {
    "stock_horovod.py": "topk: each of 2 ranks sends",
    "ddp.py": "topk: each of 2 ranks sends",
    "cifar.py": "digits: no --data was given",
    "transformer.py": "each rank sends",
    "accumulation.py": "step 100: loss",
    "gradscaler.py": "skipped so far",
    "resume.py": "ends after step 100",
    "elastic.py": "step 200: loss",
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_what_it_is(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 80
    assert lines[0].startswith('"""') and lines[0].rstrip('"').endswith((".", "]", "matplotlib"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_no_example_hides_a_package(path: Path) -> None:
    """Python looks for packages in the folder of the program first: a horovod.py there would be imported for Horovod."""
    assert path.stem not in {*sys.stdlib_module_names, *packages_distributions()}


def test_the_page_has_every_example_and_a_command_that_runs_it() -> None:
    assert [name for name, _ in ROWS] == sorted((path.name for path in EXAMPLES), key=[name for name, _ in ROWS].index)
    assert all(f"examples/{name}" in shlex.split(command) for name, command in ROWS)
    assert SAYS.keys() == {name for name, _ in ROWS} - {"dashboard.py"}


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    """Start a command of the page in a folder that has the examples, and a script that prints what stands in `hosts`."""
    (folder / "examples").exists() or (folder / "examples").symlink_to(ROOT / "examples")
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    script.chmod(0o755)
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    return subprocess.Popen(
        shlex.split(command),
        cwd=folder,
        env={**inherited, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(running: subprocess.Popen[str], before: str = "") -> str:
    """Wait for the end of a command. Return all that it said."""
    try:
        said = before + running.communicate(timeout=180)[0]
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGINT)  # horovodrun then ends its ranks, which have sessions of their own
    assert running.returncode == 0, said
    return said


def run(command: str, folder: Path) -> str:
    """Run a command of the page with one host of two slots."""
    (folder / "hosts").write_text("localhost:2\n")
    return end(start(command, folder))


@pytest.mark.long
@pytest.mark.parametrize("name, command", [row for row in ROWS if row[0] in SAYS])
def test_the_command_of_the_page_runs(name: str, command: str, tmp_path: Path) -> None:
    assert shutil.which("horovodrun", path=Path(sys.executable).parent), "Horovod is not installed beside this Python"
    assert SAYS[name] in run(command, tmp_path)


@pytest.mark.long
def test_a_rank_joins_the_elastic_training(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost:1\n")
    running = start(dict(ROWS)["elastic.py"].replace("-np 2", "-np 1", 1) + " --steps 2000", tmp_path)
    assert running.stdout is not None
    said = ""
    while "ranks: 1" not in said:
        line = running.stdout.readline()
        assert line, said
        said += line
    (tmp_path / "more").write_text("localhost:2\n")
    (tmp_path / "more").replace(tmp_path / "hosts")
    said = end(running, said)
    (begin,) = re.findall(r"training from step (\d+) on, ranks: 2", said)
    assert 0 < int(begin) < 2000 and int(begin) % 10 == 0 and "step 2000: loss" in said
