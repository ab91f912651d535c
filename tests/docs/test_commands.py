"""Every command of the project that a page shows is one, with its program, subcommand and options, and so is every spec."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from documents import ROOT, USERS, blocks, name_of

import gradcomp.__main__ as command_line
from gradcomp import doctor
from gradcomp.prediction import command as prediction
from gradcomp.spec import auto_of, make
from laboratory import demo
from laboratory import main as laboratory

# Programs of the project, as a page may call them.
OURS = re.compile(r"(?:[\w./]*/)?scripts/([a-z_]+)$")
# A script that takes no options. Pages show it without any.
WITHOUT_HELP = {"knobs"}
# Words that stand for the user's own.
STANDING = {"NAME": "topk", "SPEC": "topk:ratio=0.01"}


def shown(page: Path) -> Iterator[str]:
    """List the commands of a page: the lines of its shell blocks, and code within its text."""
    for block in blocks(page):
        if block.language == "sh":
            yield from re.sub(r" +#.*", "", block.text.replace("\\\n", " ")).splitlines()
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield from (re.sub(r"\s+", " ", found) for found in re.findall(r"`([^`]+)`", text))


def calls(page: Path) -> Iterator[list[str]]:
    """List the project's commands on a page, as words. Settings of variables before a command count as none of it."""
    for line in shown(page):
        for part in re.split(r"&&|\|\| | > ", line):
            try:
                words = shlex.split(part)
            except ValueError:  # no command: text with an apostrophe
                continue
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            if words and (
                OURS.match(words[0]) or (words[0] == "gradcomp" and words[1:2] and words[1] in command_line.COMMANDS)
            ):
                yield words


CALLS = {" ".join(words): words for page in USERS for words in calls(page)}


@cache
def help_of(script: str) -> str:
    done = subprocess.run([ROOT / "scripts" / script, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_script(script: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert (ROOT / "scripts" / script).is_file(), f"there is no scripts/{script}"
    said = ""
    if script == "demo":  # its --help first sets up
        with pytest.raises(SystemExit):
            demo.parse(["--help"])
        said = capsys.readouterr().out
    elif script == "lab" and options:
        with pytest.raises(SystemExit) as ended:
            laboratory.main([options[0], "--help"])
        assert ended.value.code == 0, f"scripts/lab has no {options[0]}"
        said = capsys.readouterr().out
    elif script not in WITHOUT_HELP:
        said = help_of(script)
    own = options[: options.index("--")] if "--" in options else options
    for option in own:
        assert not option.startswith("-") or option == "--help" or option in said, f"scripts/{script} has no {option}"


@pytest.mark.parametrize("call", CALLS)
def test_a_command_exists(call: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = [STANDING.get(word, word) for word in CALLS[call]]
    if found := OURS.match(words[0]):
        check_script(found[1], words[1:], capsys)
        return
    ran: list[str] = []
    monkeypatch.setattr(prediction, "run", lambda options: ran.append("predict"))
    monkeypatch.setattr(doctor, "findings", lambda: ran.append("doctor") or [])
    if words[1:] == ["predict"]:
        with pytest.raises(SystemExit) as ended:
            command_line.main([*words[1:], "--help"])
        assert ended.value.code == 0
    else:
        command_line.main(words[1:])
        assert ran or capsys.readouterr().out


def test_there_are_commands_and_wrong_ones_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(CALLS) > 20
    for script, options in (("setup", ["--instal1"]), ("lab", ["kernels", "--sizes"]), ("nothing", [])):
        with pytest.raises(AssertionError, match=r"has no|there is no"):
            check_script(script, options, capsys)


def test_a_script_without_help_is_shown_without_options() -> None:
    for words in CALLS.values():
        found = OURS.match(words[0])
        assert not found or found[1] not in WITHOUT_HELP or not words[1:], words


def test_no_page_is_left_out() -> None:
    assert {name_of(page) for page in USERS} >= {"README.md", "docs/start.md", "docs/algorithms/index.md"}


# Specs.

SPEC_OF_CALL = re.compile(
    r"\b(?:attach|change|Compression|Handler|GradcompStrategy|DistributedOptimizer|LocalSteps)\((?:[^()\"]|\([^()]*\))*\"([^\"]+)\""
)
OF_PAGES = {(name_of(page), spec) for page in USERS for spec in SPEC_OF_CALL.findall(page.read_text()) if "SPEC" not in spec}


@pytest.mark.parametrize(("page", "spec"), sorted(OF_PAGES))
def test_a_spec_of_a_page(page: str, spec: str) -> None:
    assert auto_of(spec) or make(spec), page


def test_there_are_specs() -> None:
    assert ("docs/frameworks.md", "blocks; *.bias=dense") in OF_PAGES and len(OF_PAGES) > 10
