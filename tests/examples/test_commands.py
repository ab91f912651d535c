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
from typing import Any

import pytest
import trainers

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
    "fsdp.py": "each rank sends 8.1 times fewer bytes",
    "accumulation.py": "step 100: loss",
    "gradscaler.py": "skipped so far",
    "resume.py": "ends after step 100",
    "local_steps.py": "step 200: loss",
    "two_sites.py": "between the sites, each rank sends 1239 times fewer bytes",
    "elastic.py": "step 200: loss",
    "hf_trainer.py": "the ranks exchange updates",
    "accelerate_loop.py": "gradcomp-rank0.pt, gradcomp-rank1.pt",
    "lightning_trainer.py": "the ranks exchange updates",
    "fabric_loop.py": "step 100: loss",
    "gan.py": "the mean of made pictures",
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
    assert SAYS.keys() == {name for name, _ in ROWS} - {
        "dashboard.py",
        "ray_train.py",
        "trackers.py",
    }  # tests/long has the latter two


def run(command: str, folder: Path, **more: str) -> str:
    """Run a command of the page in a folder that has the examples, and a script that names one host of two slots."""
    (folder / "examples").symlink_to(ROOT / "examples")
    script = folder / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    running = subprocess.Popen(shlex.split(command), cwd=folder, env=inherited | own | more, **options)
    try:
        said: str = running.communicate(timeout=180)[0]
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGINT)  # horovodrun then ends its ranks, which have sessions of their own
    assert running.returncode == 0, said
    return said


# Examples that need packages of trainers, which an environment of their own has.
OF_TRAINERS = ("hf_trainer.py", "accelerate_loop.py", "lightning_trainer.py", "fabric_loop.py")


@pytest.mark.long
@pytest.mark.parametrize("name, command", [row for row in ROWS if row[0] in SAYS])
def test_the_command_of_the_page_runs(name: str, command: str, tmp_path: Path) -> None:
    assert shutil.which("horovodrun", path=Path(sys.executable).parent), "Horovod is not installed beside this Python"
    more = {"PYTHON_EXEC": str(trainers.python())} if name in OF_TRAINERS else {}  # torchrun starts that Python
    assert SAYS[name] in run(command, tmp_path, **more)
