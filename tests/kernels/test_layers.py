"""Files in csrc are named for their layer, include no higher one, and stand in csrc/README.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
# From the bottom: the beginnings of the names of a layer's files.
LAYERS = [
    ["span.", "expects."],
    ["math.", "math_"],
    ["ops.", "ops_"],
    ["cpu/entry_", "cpu/lane_", "cuda/launch."],
    ["cpu/thread_", "cuda/thread_"],
    ["cuda/warp."],
    ["cpu/block_", "cuda/block.", "cuda/block_"],
    ["cpu/bucket_", "cuda/device_"],
    ["chains."],
    ["cpu/", "cuda/"],
    ["bind.", "bind_"],
]
# Lines that a file has at most.
MOST_LINES = 450


def files() -> list[str]:
    paths = (path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*") if path.is_file())
    return sorted(path for path in paths if not path.endswith(".md"))


def layer(path: str) -> int:
    """Find the first layer whose names begin like this one; the twins themselves are .cpp and .cu files of any name."""
    found = [i for i, names in enumerate(LAYERS) if any(path.startswith(name) for name in names)]
    assert found, f"{path} is named for no layer"
    kernel = Path(path).suffix in (".cpp", ".cu") and "/" in path
    assert kernel == (found[0] == LAYERS.index(["cpu/", "cuda/"])), f"{path} is named for no layer"
    return found[0]


def included(path: str, text: str) -> Iterator[str]:
    """List the files of csrc that a file with this text includes."""
    for name in re.findall(r'#include "(.+?)"', text):
        yield (CSRC / path).parent.joinpath(name).resolve().relative_to(CSRC).as_posix()


def goes_up(path: str, text: str) -> list[str]:
    """List the includes that go to a higher layer, or from one device to the other."""
    own = layer(path)
    other = {"cpu": "cuda/", "cuda": "cpu/"}.get(path.partition("/")[0], "-")
    return [name for name in included(path, text) if layer(name) > own or name.startswith(other)]


def test_every_file_is_named_for_its_layer_and_includes_none_above() -> None:
    for path in files():
        assert goes_up(path, (CSRC / path).read_text()) == [], path


@pytest.mark.parametrize(
    "path,name",
    [
        ("math.h", "ops.h"),
        ("cuda/warp.cuh", "block.cuh"),
        ("cuda/topk.cu", "../cpu/lane_hot.h"),
    ],
)
def test_no_include_that_goes_up_escapes(path: str, name: str) -> None:
    assert goes_up(path, f'#include "{name}"\n') != []


def test_no_file_is_too_long() -> None:
    for path in files():
        assert len((CSRC / path).read_text().splitlines()) <= MOST_LINES, path


def test_the_readme_names_every_file() -> None:
    named = set()
    for cell in re.findall(r"^\|[^|]*\|([^|]*)\|", (CSRC / "README.md").read_text(), re.MULTILINE):
        folder = ""
        for name in re.findall(r"`(.+?)`", cell):
            folder = f"{name.rpartition('/')[0]}/" if "/" in name else folder
            named.add(name if "/" in name else folder + name)
    kernels = {path for path in files() if re.fullmatch(r"cpu/.+\.cpp|cuda/.+\.cu", path)}
    assert named - {"cpu/*.cpp", "cuda/*.cu"} == set(files()) - kernels
