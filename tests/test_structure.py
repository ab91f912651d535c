"""The house: imports between rooms go down only, each outside world has one door, and a new algorithm is three edits."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import pytest_make_collect_report

import gradcomp
from gradcomp.native import extension

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gradcomp"

# From the ground up: the files of a room import only from their own room and from those that stand before it.
ROOMS = [
    "_version",
    "aliases",
    "native",
    "knobs",
    "saved",
    "core",
    "core/requests",
    "core/compressor",
    "messages",
    "core/wrapper",
    "core/by_layer",
    "core/by_host",
    "networks",
    "exchanges",
    "compressors",
    "engine",
    "engine/slots",
    "engine/digests",
    "engine/context",
    "engine/updates",
    "engine/updates/hidden_momentum",
    "engine/feedback",
    "engine/health",
    "engine/updates/adam_noise",
    "engine/updates/progress",
    "engine/bucket",
    "engine/plan",
    "engine/clock",
    "engine/updates/steps",
    "engine/updates/agreement",
    "engine/reducer",
    "engine/state",
    "engine/updates/optimizers",
    "engine/updates/to_gradients",
    "engine/meeting",
    "engine/phases",
    "engine/announcement",
    "engine/updates/unsuited",
    "engine/updates/step_exchange",
    "engine/resume",
    "engine/gradients",
    "engine/session",
    "engine/gathered_weights",
    "engine/modules",
    "engine/roll_call",
    "engine/buffers",
    "engine/outside_steps",
    "engine/weight_copies",
    "engine/fragments",
    "spec",
    "prediction",
    "auto",
    "telemetry",
    "handle",
    "simulate",
    "ddp",
    "fsdp",
    "sites",
    "local",
    "integrations",
    "horovod",
    "doctor",
    "__init__",
    "__main__",
]

# Rooms of several rooms. Their own line stands for their __init__.
SPLIT = ("core", "engine", "engine/updates")

# The only files that import by a name that they make up.
FINDS_ALGORITHMS, LOADS_DOORS, LOADS_MODELS = "spec.py", "__init__.py", "prediction/command.py"
# Files that load packages of others, which need not be installed.
OF_TRAINERS = [f"integrations/{name}.py" for name in ("accelerate", "lightning", "transformers")]

# Lines that a file of the package, and one of the tests, has at most.
MOST_LINES, MOST_LINES_OF_TESTS = 450, 450


def files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def at(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room(path: Path) -> str:
    return inner_room(path.relative_to(PACKAGE).with_suffix("").parts)


def inner_room(parts: Sequence[str]) -> str:
    """The room of a place: the innermost that is a room of its own."""
    depth = 1
    while "/".join(parts[:depth]) in SPLIT and len(parts) > depth and "/".join(parts[: depth + 1]) in ROOMS:
        depth += 1
    if "/".join(parts[:depth]) in SPLIT and len(parts) > depth and parts[depth] != "__init__":
        depth += 1  # a file that has no room yet
    return "/".join(parts[:depth])


def imports(tree: ast.AST) -> Iterator[str]:
    """Everything that is imported, at whatever depth, as dotted names; of `from a import b` a.b, and a, if not the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            if node.module != "gradcomp":
                yield str(node.module)


def room_of(name: str) -> str | None:
    """The room that an import leads to: of the package itself, or of anything that is no module of it, its front page."""
    parts = name.split(".")
    if parts[0] != "gradcomp":
        return None
    if len(parts) == 1:
        return "__init__"
    if parts[1] == "_native":
        return "native"
    if parts[1] not in ROOMS:
        return "__init__"
    depth = 2
    while depth < len(parts) and "/".join(parts[1:depth]) in SPLIT and "/".join(parts[1 : depth + 1]) in ROOMS:
        depth += 1
    return "/".join(parts[1:depth])


def rooms_above(path: Path, source: str) -> list[str]:
    """The imports of a file, with this text, that do not go down."""
    leads = {name: room_of(name) for name in imports(ast.parse(source))}
    own = ROOMS.index(room(path))
    return [name for name, there in leads.items() if there is not None and there != ROOMS[own] and ROOMS.index(there) >= own]


def test_every_file_has_its_room_and_every_room_a_file() -> None:
    assert {room(path) for path in files()} == set(ROOMS)
    for folder in (path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "__pycache__"):
        assert any(path.name != "__init__.py" for path in folder.glob("*.py")), f"{folder} is an empty room"


def test_imports_between_rooms_go_down_only() -> None:
    for path in files():
        assert rooms_above(path, path.read_text()) == [], at(path)


def test_only_three_files_import_by_a_made_up_name() -> None:
    """And who looks modules up that are there looks for other libraries than this one."""
    for path in files():
        names = {name for name in imports(ast.parse(path.read_text())) if re.match(r"(importlib|pkgutil|runpy)\b", name)}
        assert not names or at(path) in (FINDS_ALGORITHMS, LOADS_DOORS, LOADS_MODELS), at(path)
        assert not re.search(r"__import__|\bexec\(|\beval\(|sys\.modules\[.?[\"']gradcomp", path.read_text()), at(path)


def test_a_file_loads_only_rooms_below_its_own() -> None:
    """Without the package's front page, as it is when that is not there: whatever way a module was found."""
    pytest.importorskip("horovod.torch", reason="what files load was NOT tested: Horovod is not installed")
    code = """
import importlib, json, os, sys, types
import torch, horovod.torch  # once, for all children
front = types.ModuleType("gradcomp")
front.__path__ = [sys.argv[1]]
sys.modules["gradcomp"] = front
for module in sys.argv[2:]:
    if os.fork() == 0:
        importlib.import_module(module)
        print(json.dumps([module, [name for name in sys.modules if name.startswith("gradcomp.")]]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, module
"""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files()
        if room(path) not in ("__init__", "__main__") and at(path) not in OF_TRAINERS
    }
    done = subprocess.run([sys.executable, "-c", code, str(PACKAGE), *paths], capture_output=True, text=True, check=True)
    found = dict(map(json.loads, done.stdout.splitlines()))
    assert list(found) == list(paths)
    for module, path in paths.items():
        assert {room_of(each) for each in found[module]} <= set(ROOMS[: ROOMS.index(room(path)) + 1]), module


def importers(prefix: str) -> set[str]:
    return {
        at(path)
        for path in files()
        if any(name == prefix or name.startswith(prefix + ".") for name in imports(ast.parse(path.read_text())))
    }


def test_each_outside_world_has_one_door() -> None:
    doors = {f"horovod/{name}.py" for name in ("__init__", "compression", "elastic", "optimizer")}
    assert importers("horovod") == {*doors, "networks/horovod.py"}
    assert importers("gradcomp._native") == {"native/extension.py"}
    assert importers("torch.distributed") == {
        "ddp.py",
        "fsdp.py",
        "networks/sharded.py",
        "networks/torch.py",
        "sites.py",
    }
    for trainer in OF_TRAINERS:
        package = Path(trainer).stem
        assert importers(package) == {trainer}
    assert importers("threading") == set(), "memory has an owner, and nothing is keyed by thread"


def test_files_of_one_algorithm_stay_in_its_folder() -> None:
    for folder in (path for path in (PACKAGE / "compressors").iterdir() if path.is_dir() and path.name != "__pycache__"):
        prefix = f"gradcomp.compressors.{folder.name}"
        others = importers(prefix) - {"__init__.py"}  # which imports all classes, for type checkers and editors
        assert all(path.startswith(f"compressors/{folder.name}/") for path in others), prefix


def test_no_file_says_the_name_of_an_algorithm_outside_its_room() -> None:
    """Nor a knob's of one: neither in names nor in texts, but for docstrings, whose examples are specs."""
    algorithms = set(gradcomp.names()) - {"blocks", "dense", "half", "linear", "sign", "topk"}  # words of their own, too
    words = re.compile(rf"\b({'|'.join(algorithms | {'sam', 'lr_revision'})})\b")
    for path in (path for path in files() if room(path) != "compressors"):
        tree = ast.parse(path.read_text())
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docs = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
        for node in ast.walk(tree):
            said = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "value")]
            for text in (text for text in said if isinstance(text, str) and text not in docs):
                assert not words.search(text), f"{at(path)}: {text!r}"


def test_every_file_fits_a_few_screens() -> None:
    for path in files():
        assert len(path.read_text().splitlines()) <= MOST_LINES, at(path)
    tests = [path for path in (ROOT / "tests").rglob("*") if path.suffix in (".py", ".h", ".cpp", ".cu")]
    assert len(tests) > 50
    for path in tests:
        assert len(path.read_text().splitlines()) <= MOST_LINES_OF_TESTS, path.relative_to(ROOT)


MOST_ARGUMENTS, PUBLIC = 8, {"LocalSteps", "Simulation"}


def arguments_of(kind: ast.ClassDef) -> list[str]:
    """The arguments of a class's constructor. Of a record, with a generated one, only those that every call must give."""
    init = next((each for each in kind.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if init is not None:
        return [ast.unparse(each) for each in (*init.args.posonlyargs, *init.args.args[1:], *init.args.kwonlyargs)]
    bases = map(ast.unparse, [*kind.bases, *kind.decorator_list])
    if not any(base == "NamedTuple" or "dataclass" in base for base in bases):
        return []
    return [ast.unparse(each) for each in kind.body if isinstance(each, ast.AnnAssign) and each.value is None]


def test_no_constructor_takes_more_than_eight_arguments_nor_more_than_one_callable() -> None:
    """But for the public signatures: collaborators are objects that one can jump to."""
    for path in files():
        for kind in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
            arguments = arguments_of(kind)
            assert len(arguments) <= MOST_ARGUMENTS or kind.name in PUBLIC, f"{at(path)}: {kind.name}"
            assert sum("Callable" in each for each in arguments) <= 1, f"{at(path)}: {kind.name}"


def test_horovod_is_not_needed_for_the_rest() -> None:
    code = "import sys; sys.modules['horovod'] = None; import gradcomp; gradcomp.Simulation('topk', {'w': (3,)}, 2)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_no_torch_header_in_the_extension() -> None:
    for path in (ROOT / "csrc").rglob("*.*"):
        assert not re.search(r"#include\s*[<\"](torch|ATen|c10)", path.read_text()), path
    linked = subprocess.run(["ldd", extension.native.__file__], capture_output=True, text=True, check=True).stdout
    assert "libtorch" not in linked and "libc10" not in linked


def test_every_algorithm_is_a_file_a_test_and_a_row() -> None:
    table = (ROOT / "docs" / "algorithms" / "index.md").read_text()
    for name in gradcomp.names():
        places = [PACKAGE / "compressors" / f"{name}.py", PACKAGE / "compressors" / name / "__init__.py"]
        assert sum(path.is_file() for path in places) == 1
        tests = [ROOT / "tests" / "compressors" / f"test_{name}.py", ROOT / "tests" / "compressors" / name / f"test_{name}.py"]
        assert sum(path.is_file() for path in tests) == 1
        assert re.search(rf"^\| \[?`{name}`", table, re.MULTILINE), f"docs/algorithms/index.md has no row for {name}"


def test_a_new_file_is_a_new_algorithm(tmp_path: Path) -> None:
    """Nothing else has to be edited for a compressor to be there under its name, with its knobs and its error feedback."""
    shutil.copytree(PACKAGE, tmp_path / "gradcomp")
    (tmp_path / "gradcomp" / "compressors" / "first.py").write_text(
        """
from dataclasses import dataclass
import torch
from gradcomp.knobs import knob
from gradcomp.native.memory import Update
from gradcomp.core.compressor import Acc, Compressor, Steps
from gradcomp.core.requests import World, reduce

@dataclass(frozen=True)
class First(Compressor):
    '''The first entries.'''

    count: int = knob(1, "entries sent", least=1)

    def exchange(self, acc: Acc, state: None, world: World) -> Steps:
        update = torch.zeros_like(acc.residual)
        update[:self.count] = yield from reduce(acc.residual[:self.count].clone(), 1 / world.size)
        acc.residual[:self.count] = 0
        return Update(update)
"""
    )
    code = """
import gradcomp, torch
assert 'first' in gradcomp.names()
assert 'entries sent' in gradcomp.describe('first')
simulation = gradcomp.Simulation('first:count=2', {'w': (3,)}, 2)
assert simulation.step([{'w': torch.ones(3)}, {'w': torch.full((3,), 3.0)}])['w'].tolist() == [2, 2, 0]
assert simulation.residual(1)['w'].tolist() == [0, 0, 3]
assert simulation.bytes_sent == [8, 8]
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_every_page_of_decisions_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    for path in folder.glob("[a-z]*.md"):
        assert f"]({path.name})" in index, path.name


# A class has at most so many fields, and methods. Those that have more are to shrink.
MOST_FIELDS, MOST_METHODS = 15, 25
LARGE_CLASSES = {"Bucket": 22, "Chooser": 20, "Reducer": 16}


def fields_of(found: ast.ClassDef) -> set[str]:
    """Name the attributes that a class declares, or that its methods assign to self."""
    declared = {each.target.id for each in found.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}
    every = [each for each in ast.walk(found) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)]
    return declared | {each.attr for each in every if isinstance(each.value, ast.Name) and each.value.id == "self"}


@pytest.mark.parametrize("path", files(), ids=at)
def test_a_class_is_small(path: Path) -> None:
    for found in ast.walk(ast.parse(path.read_text())):
        if isinstance(found, ast.ClassDef):
            methods = [each for each in found.body if isinstance(each, ast.FunctionDef)]
            most = LARGE_CLASSES.get(found.name, MOST_FIELDS)
            assert len(fields_of(found)) <= most and len(methods) <= MOST_METHODS, found.name


# The most lines of code, and files, of the project. A commit that adds a capability raises them, by its name.
TOTALS = {"gradcomp": (18_281, 126), "scripts": (12_064, 91), "tests": (39_373, 278)}


@pytest.mark.parametrize("folder", TOTALS)
def test_the_house_stays_light(folder: str) -> None:
    """Count files of the three languages and of shell scripts, which have no suffix."""
    suffixes = (".py",) if folder == "gradcomp" else (".py", ".sh", ".h", ".cpp", ".cu", ".txt", "")
    every = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in suffixes]
    lines = sum(len(path.read_text().splitlines()) for path in every)
    most_lines, most_files = TOTALS[folder]
    assert lines <= most_lines and len(every) <= most_files, (lines, len(every))


def test_a_report_without_a_call_is_left_alone() -> None:
    """pytest --lf makes reports of its own, without the call that collected a file."""
    hook, report = pytest_make_collect_report(SimpleNamespace(nodeid="")), pytest.CollectReport("", "passed", None, [])  # type: ignore[arg-type]
    next(hook)
    with pytest.raises(StopIteration) as end:
        hook.send(report)  # type: ignore[attr-defined]
    assert end.value.value is report
