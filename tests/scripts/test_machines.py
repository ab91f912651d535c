"""scripts/check_machines without its bare machines: options, what is carried inside, what logs tell, and the record."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laboratory.machines import main, root
from laboratory.machines.cells import CELLS
from laboratory.refusal import Refused

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, str(ROOT / "scripts" / "check_machines")]
MAY_ENTER = subprocess.run(["unshare", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True).returncode == 0


def test_every_cell_is_listed() -> None:
    done = subprocess.run(
        [*PROGRAM, "--list"], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": ""}
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == [cell.name for cell in CELLS]


def test_an_unknown_cell_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--cell", "debian14"]) == 2
    assert "unknown cell 'debian14'; known: debian12-gcc12-root, " in capsys.readouterr().err


def test_settings_are_carried_by_name_and_others_are_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    (tmp_path / "wheels").mkdir()
    carried = {
        "https_proxy": "http://proxy:1",
        "PIP_INDEX_URL": "https://mirror",
        "PIP_FIND_LINKS": f"file://{tmp_path}/wheels /no",
    }
    for name, value in {**carried, "PATH": "/bin", "GITHUB_TOKEN": "secret", "MY_PIP_X": "no"}.items():
        monkeypatch.setenv(name, value)
    assert root.settings() == carried
    assert list(root.named_paths(carried)) == [tmp_path / "wheels"]


def test_no_carried_value_stands_on_a_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:token@mirror")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)  # chown
    seen: list[tuple[list[str], dict[str, str]]] = []
    bare = root.Root(tmp_path, "cell", lambda text: None)
    monkeypatch.setattr(bare, "_run", lambda words, what, variables, fine: seen.append((words, variables)))
    bare.enter(["true"], "root", "nothing", variables={"CXX": "g++-12"})
    ((words, variables),) = seen
    assert not any("token" in word for word in words) and words[-1] == "true"
    assert variables["PIP_INDEX_URL"] == "https://user:token@mirror" and variables["CXX"] == "g++-12"
    assert variables["HOME"] == "/root" and "PYTHONPATH" not in variables


def test_megabytes_come_from_what_pip_and_apt_say() -> None:
    log = "  Downloading torch-2.whl (526.6 MB)\nProgress 1 of 2\n  Using cached six.whl (500 kB)\nCollecting x (9 MB)\n"
    assert main._megabytes_of_pip(log) == pytest.approx(527.1)
    assert main._megabytes_of_apt("x\nNeed to get 1,024 kB/2 MB of archives.\n") == pytest.approx(1.024)
    assert main._megabytes_of_apt("Need to get 78.4 MB of archives.\n") == pytest.approx(78.4)


def test_a_cell_replaces_its_earlier_run_and_no_other(tmp_path: Path) -> None:
    record = tmp_path / "machines.json"
    first, second = CELLS[0].name, CELLS[1].name
    for cell, result in ((second, "failed: x"), (first, "passed"), (second, "passed")):
        main.keep(record, "scripts/check_machines", {"cell": cell, "result": result})
    kept = json.loads(record.read_text())
    assert kept["what"] == "machines" and kept["command"] == "scripts/check_machines"
    assert kept["cells"] == [{"cell": first, "result": "passed"}, {"cell": second, "result": "passed"}]


def test_what_lies_in_the_folder_of_roots_already_stays_there(tmp_path: Path) -> None:
    kept = [tmp_path / name for name in ("base-of-a-user", "pip-cache", CELLS[0].name)]
    for folder in kept:
        folder.mkdir()
    with main.folder_of_roots(argparse.Namespace(roots=str(tmp_path), keep=False)) as own:
        (own / "base-bookworm").mkdir()
        (own / "pip-cache").mkdir()
    assert sorted(tmp_path.iterdir()) == sorted(kept)


@pytest.mark.skipif(not MAY_ENTER, reason="entering a root was NOT tested: this user may make no name spaces")
def test_a_root_that_is_interrupted_leaves_neither_processes_nor_mounts(tmp_path: Path) -> None:
    """The root is this machine's own folder of programs, bound into a folder: it needs no debootstrap."""

    class Interrupted(Exception):
        pass

    began = time.monotonic()

    def show(text: str) -> None:
        if "inside" in text or time.monotonic() - began > 20:
            raise Interrupted

    bare = root.Root(tmp_path, "cell", show)
    bare.log.write_text("")
    marker = f"sleep 7{os.getpid()}"
    script = f"mkdir {bare.path} && mount --bind {tmp_path} {bare.path} && echo inside && {marker} & {marker}"
    with pytest.raises(Interrupted):
        bare._run(["bash", "-c", script], "waiting", dict(os.environ))
    assert "inside" in bare.log.read_text()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    time.sleep(0.2)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert marker not in listed.splitlines()


def test_a_root_with_something_mounted_in_it_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc").mkdir()
    monkeypatch.setattr(Path, "read_text", lambda path, *_: f"1 2 0:1 / {tmp_path}/proc rw - proc proc rw\n")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(Refused, match="something is mounted in"):
        root.remove(tmp_path)
    assert (tmp_path / "proc").is_dir()
