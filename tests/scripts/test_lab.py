"""scripts/lab: its rooms, whose imports go down only; its command line, options, tables, progress and result files."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from laboratory import main, options, report
from laboratory.options import Refused

ROOT = Path(__file__).resolve().parents[2]

SCRIPTS = ROOT / "scripts"
LABORATORY = SCRIPTS / "laboratory"

RATES = partial(options.listed, read=options.rate)

# From the ground up: a file imports from its own room and from those before it.
ROOMS = [
    *("__init__", "machine", "options", "cluster", "report", "timing", "ranks", "tasks", "kernel_cases"),
    *("kernel_prediction", "harness", "loops", "strangers", "gpu", "demo", "commands", "main"),
]

# Lines of a file, at most.
MOST_LINES = 450


def files() -> list[Path]:
    return sorted(LABORATORY.rglob("*.py"))


def rooms_of(source: str) -> Iterator[str]:
    """List the rooms that a text imports from, wherever it does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "laboratory":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name.split(".")[1] for name in names)


def test_imports_go_down_only_and_files_are_short_and_say_what_they_are() -> None:
    rooms = {path: path.relative_to(LABORATORY).parts[0].removesuffix(".py") for path in files()}
    assert set(rooms.values()) == set(ROOMS)
    for path, room in rooms.items():
        text = path.read_text()
        assert not [there for there in rooms_of(text) if ROOMS.index(there) > ROOMS.index(room)], path
        assert len(text.splitlines()) <= MOST_LINES and ast.get_docstring(ast.parse(text)), path
        assert not re.search(r"^\s*(import laboratory|from \.)", text, re.MULTILINE), path
    assert [*rooms_of("def later():\n    from laboratory.harness import measured")] == ["harness"]


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
    documented = importlib.import_module(f"laboratory.commands.{name}").__doc__
    assert documented and documented.splitlines()[0] in text


def test_a_wrong_subcommand_gets_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["kernel"]) == 2
    assert "unknown subcommand 'kernel' (did you mean 'kernels'?); known: door, kernels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["kernels", "--rounds", "0"], "'0' is not a whole number above 0"),
        (["kernels", "--colour", "red"], "unrecognized arguments: --colour red"),
        (["train", "--ways", "tpk"], "did you mean 'topk'"),
        *((["train", "--later", text], "rate") for text in ("100mbit", "100mbit:", "fast:3", "100mbit:-1")),
        (["study", "--tasks", "cnov"], "unknown task 'cnov' (did you mean 'conv'?); known: mlp, conv, cifar"),
        (["study", "--seeds", "0"], "'0' is not a whole number above 0"),
        (["study", "--set", "stpes=3"], "unknown setting 'stpes' (did you mean 'steps'?)"),
        (["study", "--set", "steps=2.5"], "not a whole number above 0"),
        (["study", "--set", "momentum=1"], "momentum='1' is not a number in [0, 1)"),
        (["study", "--set", "weight_decay=-1"], "not a number from 0 on"),
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
    command = importlib.import_module(f"laboratory.commands.{name}")
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


def test_the_recorded_command_names_no_folder() -> None:
    given = ["study", "--out", "/some/where", "--seeds", "2", "--cache=/else"]
    assert main.without_folders(given) == ["study", "--seeds", "2"]


@pytest.mark.parametrize(
    ("read", "text", "found"),
    [
        (options.size, "16.8M", 16_800_000),
        (options.size, "500k", 500_000),
        (RATES, "1gbit, 100MBIT,none", ["1gbit", "100mbit", "none"]),
        (options.hosts, "8", 8),
        (options.specs, "dense,topk:ratio=0.01,momentum=0.9,half", ["dense", "topk:ratio=0.01,momentum=0.9", "half"]),
        (options.specs, "dense;topk:ratio=0.01,momentum=0.9; half", ["dense", "topk:ratio=0.01,momentum=0.9", "half"]),
    ],
)
def test_options_are_read_as_people_write_them(read: Callable[[str], object], text: str, found: object) -> None:
    assert read(text) == found


@pytest.mark.parametrize(
    ("read", "texts", "message"),
    [
        (options.size, ["", "1G", "999", "-5k", "3000M", "many"], "not a size"),
        (RATES, ["fast", "0gbit", "1gbit,", "100"], "not a rate"),
        (options.hosts, ["0", "300", "two"], "hosts|whole number"),
        (options.name, ["", "../x", "Upper", "a b"], "part of a file's name"),
        (options.specs, ["tpk"], "did you mean 'topk'"),
        (options.specs, ["dense,dense"], "twice"),
        (options.specs, [""], "nothing is given"),
        (options.specs, ["stock"], "there is no compressor 'stock'"),
    ],
)
def test_a_wrong_option_is_refused_before_the_work(read: Callable[[str], Any], texts: list[str], message: str) -> None:
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            read(text)


def test_a_table_is_aligned() -> None:
    rows = [("", "ms"), ("copy_", "1.5"), ("a", "10")]
    assert report.columns(rows).splitlines() == ["        ms", "-" * 10, "copy_  1.5", "a       10"]
    assert report.markdown(rows).splitlines() == ["|  | ms |", "|---|--:|", "| copy_ | 1.5 |", "| a | 10 |"]


def test_progress_comes_in_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    shown = report.Progress()
    for step in range(1, 5):
        shown(f"step {step}", step / 4)
    assert [line.split()[:2] for line in capsys.readouterr().err.splitlines()] == [["step", "4"]]


def test_a_result_file_names_its_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = argparse.Namespace(subcommand="kernels", command="scripts/lab kernels", name=None, out=tmp_path)
    path = report.path_of(chosen, "cpu-x")
    report.save(chosen, "cpu-x", {"lines": []})
    found = json.loads((tmp_path / "kernels-cpu-x.json").read_text())
    assert list(found) == ["what", "command", "date", "commit", "machine", "versions", "lines"]
    assert str(path) in capsys.readouterr().out
    chosen.name = "mine"
    assert report.path_of(chosen, "cpu-x").name == "kernels-mine.json"
    assert report.path_of(argparse.Namespace(subcommand="confirm", name=None, out=tmp_path), None).name == "confirm.json"


def test_a_broken_file_of_finished_work_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(Refused, match=r"run\.json in .* is not JSON; delete it"):
        report.read(tmp_path / "run.json")
