"""scripts/check_ssh: its refusals, what it calls a fault, and the launchers themselves through real ssh daemons."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from laboratory.cluster import network
from laboratory.ssh import main

ROOT = Path(__file__).resolve().parents[2]
LACKING = [program for program in main.PROGRAMS if not network.find(program)]
RIGHT: list[dict[str, Any]] = [
    {"launcher": name, "ranks": 4, "logins": {"host1": 2, "host2": 2}, "losses": [1.5, 0.5]}
    for name in ("horovodrun", "torchrun")
]


def test_a_user_without_rights_is_told_who_may(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main.main([]) == 2
    assert "check_ssh: needs root to make network namespaces" in capsys.readouterr().err


def test_a_missing_program_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network, "find", lambda program: None if program == "sshd" else program)
    assert main.main([]) == 2
    assert capsys.readouterr().err == "check_ssh: the program sshd is missing; apt-get install openssh-server\n"


def test_each_fault_is_named() -> None:
    assert main.faults(RIGHT) is None
    for launcher, key, value, sentence in (
        (0, "logins", {"host1": 2, "host2": 0}, "horovodrun reached no rank by ssh on host2"),
        (1, "ranks", 2, "torchrun trained on 2 ranks, not 4"),
        (1, "losses", [0.5, 1.5], "the loss did not fall under torchrun: [0.5, 1.5]"),
        (0, "losses", [], "the loss did not fall under horovodrun: []"),
        (1, "losses", [1.5, 0.4], "the launchers trained unlike each other: the losses differ"),
    ):
        found = copy.deepcopy(RIGHT)
        found[launcher][key] = value
        assert main.faults(found) == sentence


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="launchers over ssh were NOT tested: they need root")
@pytest.mark.skipif(bool(LACKING), reason=f"launchers over ssh were NOT tested: {LACKING} missing, install openssh-server")
def test_both_launchers_train_on_hosts_that_ssh_reaches(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "check_ssh"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=700)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "ssh.json").read_text())
    assert [each["launcher"] for each in record["launchers"]] == ["horovodrun", "torchrun"]
    assert all(each["logins"].keys() == {"host1", "host2"} for each in record["launchers"])
