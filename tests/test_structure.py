"""The house: imports go down only, each outside world has one door, and a new algorithm is three edits."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gradcomp

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gradcomp"

FLOORS = [
    "core",
    "kernels",
    "wire",
    "places",
    "autoencoder",
    "watch",
    "clock",
    "tree",
    "paths",
    "split",
    "leading",
    "coding",
    "routes",
    "sketches",
    "quantising",
    "staleness",
    "capacity",
    "phases",
    "hosts",
    "wrap",
    "compressors",
    "reducer",
    "checkpoint",
    "slot",
    "carrier",
    "agreement",
    "simulate",
    "front",
    "ddp",
    "horovod",
]
"""From the ground up: a module imports only what stands before it."""


def imports(path: Path) -> set[str]:
    """Everything a file imports, at whatever depth, as dotted names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def floor(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if floor(path) != "__init__"]


def test_every_module_has_its_floor() -> None:
    assert {floor(path) for path in modules()} == set(FLOORS)


def test_imports_go_down_only() -> None:
    for path in modules():
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "gradcomp" or len(parts) == 1 or parts[1] not in FLOORS:
                continue
            if floor(path) == parts[1] == "compressors" and len(parts) > 2:
                continue  # one algorithm may make use of another
            below = FLOORS.index(parts[1]) < FLOORS.index(floor(path))
            assert below, f"{path.relative_to(ROOT)} imports {name}, which does not stand below it"


def importers(prefix: str) -> set[str]:
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(name == prefix or name.startswith(prefix + ".") for name in imports(path))
    }


def test_each_outside_world_has_one_door() -> None:
    assert importers("horovod") == {"horovod.py"}
    assert importers("gradcomp._native") == {"kernels.py"}
    assert importers("torch.distributed") == {"ddp.py"}


def test_horovod_is_not_needed_for_the_rest() -> None:
    code = "import sys; sys.modules['horovod'] = None; import gradcomp; gradcomp.Simulation('topk', {'w': (3,)}, 2)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_no_torch_header_in_the_extension() -> None:
    for path in (ROOT / "csrc").rglob("*.*"):
        assert not re.search(r"#include\s*[<\"](torch|ATen|c10)", path.read_text()), path
    linked = subprocess.run(["ldd", gradcomp.kernels._native.__file__], capture_output=True, text=True, check=True).stdout
    assert "libtorch" not in linked and "libc10" not in linked


def test_every_algorithm_is_a_file_a_test_and_a_row() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in gradcomp.names():
        assert (PACKAGE / "compressors" / f"{name}.py").is_file()
        assert (ROOT / "tests" / "compressors" / f"test_{name}.py").is_file()
        assert re.search(rf"^\| `{name}` \|", readme, re.MULTILINE), f"README's table has no row for {name}"


def test_a_new_file_is_a_new_algorithm(tmp_path: Path) -> None:
    """Nothing else has to be edited for a compressor to be there under its name, with its knobs and its error feedback."""
    shutil.copytree(PACKAGE, tmp_path / "gradcomp")
    (tmp_path / "gradcomp" / "compressors" / "first.py").write_text(
        """
from dataclasses import dataclass
import torch
from gradcomp.core import Acc, Compressor, Reduce, Steps, World

@dataclass(frozen=True)
class First(Compressor):
    count: int = 1

    def exchange(self, acc: Acc, state: None, world: World) -> Steps:
        update = torch.zeros_like(acc.value)
        update[:self.count] = yield Reduce(acc.value[:self.count].clone(), scale=1 / world.size)
        acc.value[:self.count] = 0
        return update
"""
    )
    code = """
import gradcomp, torch
assert 'first' in gradcomp.names()
simulation = gradcomp.Simulation('first:count=2', {'w': (3,)}, 2)
assert simulation.step([{'w': torch.ones(3)}, {'w': torch.full((3,), 3.0)}])['w'].tolist() == [2, 2, 0]
assert simulation.residual(1)['w'].tolist() == [0, 0, 3]
assert simulation.bytes_sent == [8, 8]
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
