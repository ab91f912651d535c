"""The scripts of the page Start run as it says, on two ranks of torchrun and horovodrun, and print what it shows.

A section's first command is called as it stands. The second one, which resumes, runs on forked ranks, which start at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, Block, blocks
from ranks import launch

# What a rank of torch 2.13 says now and then at its end, after all is done (docs/troubleshooting.md, "At the end").
ABORTED = "terminate called without an active exception"

PAGE = ROOT / "docs" / "start.md"
LAUNCHERS = {"Horovod": "horovodrun", "DDP": "torchrun", "FSDP2": "torchrun"}


def section(heading: str) -> list[Block]:
    """List the blocks of a section of the page."""
    lines = PAGE.read_text().splitlines()
    begin = lines.index(f"## {heading}")
    end = next(at for at in range(begin + 1, len(lines)) if lines[at].startswith("## "))
    return [block for block in blocks(PAGE) if begin < block.line <= end]


def script(heading: str) -> str:
    """Return a section's script: its own, or that of DDP with the section's changes."""
    (changes,) = [block.text for block in section(heading) if block.language in ("python", "diff")]
    if not changes.startswith("-"):
        return changes
    text = script("DDP")
    for hunk in re.split(r"^@@\n", changes, flags=re.MULTILINE):
        lines = [line or " " for line in hunk.splitlines()]
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert text.count(old) == 1, f"these lines are not in the script of DDP:\n{old}"
        text = text.replace(old, new)
    return text


def environment() -> dict[str, str]:
    """Return this process's environment, for ranks of this checkout that share its cores and its machine."""
    tools = Path(sys.executable).parent
    own = {"PYTHONPATH": str(ROOT), "PATH": f"{tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "5"}
    return os.environ | own


def by_command(command: str, folder: Path) -> str:
    """Run a command of a page, and return what its ranks print, without horovodrun's marks."""
    own: dict[str, Any] = {"cwd": folder, "env": environment(), "timeout": 120, "start_new_session": True}
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, **own)
    if ABORTED in done.stderr:
        shutil.rmtree(folder / "checkpoints")
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, **own)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"^\[\d+\](,\d+)?<stdout>: ?", "", done.stdout, flags=re.MULTILINE)


def again(folder: str, steps: str, port: int) -> str:
    """Run the script on this rank, and return what it prints."""
    os.chdir(folder)
    rank, size = (os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE"))
    os.environ |= {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["train.py", steps]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(Path("train.py").read_text(), "train.py", "exec"), {"__name__": "__main__"})
    return said.getvalue()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def without_losses(lines: list[str]) -> list[str]:
    return [re.sub(r"loss [0-9.]+", "loss", line) for line in lines]


def losses(lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.search(r"loss ([0-9.]+)", line))]


@pytest.mark.slow
@pytest.mark.parametrize("heading", LAUNCHERS)
def test_a_tutorial_runs(heading: str, tmp_path: Path) -> None:
    by_language = {block.language: block.text for block in section("DDP") + section(heading)}
    shown = by_language["text"].splitlines()
    of_first = next(at for at, line in enumerate(shown) if line.startswith("resuming"))
    commands = [re.sub(r" +#.*", "", line) for line in by_language["sh"].splitlines()]
    first, second = [line for line in commands if line.startswith(LAUNCHERS[heading])]
    assert first.rpartition(" ")[0] == second.rpartition(" ")[0], "the second command only asks for more steps"
    (tmp_path / "train.py").write_text(script(heading))
    printed = [line for line in by_command(first, tmp_path).splitlines() if line.startswith("step")]
    resumed, other = launch(again, 2, str(tmp_path), second.rpartition(" ")[2], free_port())
    assert without_losses(printed) == without_losses(shown[:of_first])
    assert without_losses(resumed.splitlines()) == without_losses(shown[of_first:])
    assert other == "", "rank 0 alone prints"
    every = losses([*printed, *resumed.splitlines()])
    assert every == pytest.approx(losses(shown), rel=0.2)  # another processor rounds otherwise
    assert every[0] > every[-1]
