"""scripts/lab: its command line, and the rooms of the laboratory, whose imports go down only."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from laboratory import main

ROOT = Path(__file__).resolve().parents[2]

SCRIPTS = ROOT / "scripts"
LABORATORY = SCRIPTS / "laboratory"

# From the ground up: a file imports from its own room and from those before it.
ROOMS = [
    *("__init__", "cluster", "refusal", "machine", "options", "report", "timing", "stats", "ranks", "tasks"),
    *("kernels", "harness", "soak", "gpu", "drawings", "demo", "commands", "main"),
]

# Lines of a file, at most.
MOST_LINES = 450


def files() -> list[Path]:
    return sorted(LABORATORY.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(LABORATORY).parts[0].removesuffix(".py")


def rooms_above(path: Path, source: str) -> list[str]:
    """List the imports of a file, with this text, that do not go down."""
    own = ROOMS.index(room(path))
    return [there for there in rooms_of(ast.parse(source)) if ROOMS.index(there) > own]


def rooms_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("laboratory."))


def test_imports_go_down_only() -> None:
    assert {room(path) for path in files()} == set(ROOMS)
    for path in files():
        assert rooms_above(path, path.read_text()) == [], path
    assert rooms_above(LABORATORY / "ranks.py", "def later():\n    from laboratory.harness import measured") == ["harness"]


def test_files_are_short_and_say_what_they_are() -> None:
    for path in files():
        text = path.read_text()
        assert len(text.splitlines()) <= MOST_LINES, path
        assert ast.get_docstring(ast.parse(text)), path


def test_nothing_changes_the_path_of_imports() -> None:
    """But for the program that `lab paired` runs in another checkout."""
    programs = [path for path in SCRIPTS.iterdir() if path.is_file()]
    changing = [path.name for path in (*files(), *programs) if re.search(r"sys\.path\.insert", path.read_text())]
    assert changing == ["paired.py"]


def test_without_arguments_the_subcommands_are_listed() -> None:
    done = subprocess.run([sys.executable, SCRIPTS / "lab"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert [line.split()[0] for line in done.stderr.splitlines() if re.match(r"  \w", line)] == list(main.SUBCOMMANDS)


@pytest.mark.parametrize("name", main.SUBCOMMANDS)
def test_every_subcommand_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([name, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and f"scripts/lab {name} " in text and "example" in text
    documented = importlib.import_module(main.module_of(name)).__doc__
    assert documented and documented.splitlines()[0] in text


def test_a_wrong_subcommand_gets_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["kernel"]) == 2
    assert "unknown subcommand 'kernel' (did you mean 'kernels'?); known: kernels, resources" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["kernels", "--rounds", "0"], "'0' is not a whole number above 0"),
        (["kernels", "--colour", "red"], "unrecognized arguments: --colour red"),
        (["train", "--ways", "tpk"], "did you mean 'topk'"),
        (["resources", "--arch", "90"], "write for example sm_90"),
        (["study", "--tasks", "cnov"], "unknown task 'cnov' (did you mean 'conv'?); known: mlp, conv, cifar"),
        (["study", "--tasks", ""], "unknown task ''"),
        (["study", "--seeds", "1"], "give at least two seeds"),
        (["study", "--set", "stpes=3"], "unknown setting 'stpes' (did you mean 'steps'?)"),
        (["study", "--set", "steps=2.5"], "not a whole number above 0"),
        (["study", "--set", "momentum=1"], "momentum='1' is not a number in [0, 1)"),
        (["study", "--set", "weight_decay=-1"], "not a number from 0 on"),
        (["study", "--set", "cnov.lr=1"], "unknown task 'cnov'"),
        (["study", "--name", "../x"], "part of a file's name"),
    ],
)
def test_wrong_options_end_with_a_sentence(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(given)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("below", ["", "/below"])
@pytest.mark.parametrize("given", ["kernels --out", "study --out", "study --cache"])
def test_a_file_in_place_of_a_folder_is_refused_before_the_work(
    given: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, option = given.split()
    command = importlib.import_module(main.module_of(name))
    monkeypatch.setattr(command, "run", lambda chosen: pytest.fail("the work began"))
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main.main([name, option, f"{tmp_path}/file{below}"])
    assert ended.value.code == 2
    sentence = f"argument {option}: '{tmp_path}/file' is not a folder; name a folder, which need not exist yet"
    assert sentence in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name="torch")

    monkeypatch.setattr(main.importlib, "import_module", missing)
    assert main.main(["kernels"]) == 2
    assert "the Python package torch is missing" in capsys.readouterr().err


def test_an_interruption_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str, arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "_run", interrupted)
    assert main.main(["study"]) == 130
    assert "lab study: interrupted" in capsys.readouterr().err


def test_the_recorded_command_names_no_folder() -> None:
    given = ["study", "--out", "/some/where", "--seeds", "2", "--cache=/else"]
    assert main.without_folders(given) == ["study", "--seeds", "2"]
