"""The program gradcomp: what it says in short, and that it does not wait for torch where it needs none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gradcomp
from gradcomp import __main__ as program

ROOT = Path(__file__).resolve().parents[1]


def test_the_console_script_is_this_program() -> None:
    assert '[project.scripts]\ngradcomp = "gradcomp.__main__:run"\n' in (ROOT / "pyproject.toml").read_text()
    assert callable(program.run)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["list", "--help"], ["lst"]])
def test_help_does_not_wait_for_torch(words: list[str]) -> None:
    code = f"import sys\nfrom gradcomp.__main__ import main\ntry: main({words!r})\nexcept SystemExit: "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT).returncode == 0


def test_the_list_begins_with_what_is_recommended_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    program.main(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    first, second = (
        [line.split()[0] for line in part.splitlines() if line[:1].islower()]
        for part in "\n".join(lines).split("All compressors")
    )
    assert set(first) <= {*gradcomp.names(), "auto"} and second == gradcomp.names()
    assert all(f'"{name}"' in (ROOT / "README.md").read_text() for name in first)


def test_a_slip_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for word, said in (("pedict", "did you mean predict?"), ("run", "take list, describe, doctor, predict")):
        with pytest.raises(SystemExit) as ended:
            program.main([word])
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_doctor_tells_programs_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from gradcomp import doctor

    found = [doctor.Finding("torch", "2.13.0"), doctor.Finding("host name", "x, which does not resolve", "add a line")]
    monkeypatch.setattr(doctor, "findings", lambda: found)
    with pytest.raises(SystemExit) as ended:
        program.main(["doctor", "--json"])
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().out) == [each._asdict() for each in found]
    monkeypatch.setattr(doctor, "findings", lambda: found[:1])
    program.main(["doctor"])
    assert capsys.readouterr().out.endswith("No problems.\n")
