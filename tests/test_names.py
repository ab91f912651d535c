"""The names of options and functions: a program in the old ones runs as one in the new ones, with the promised warnings."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.core.compressor import Compressor
from gradcomp.spec import kind_of

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {"w": (40, 5), "b": (5,)}


def simulated(spec: Any, how: str = "change", **options: Any) -> list[Any]:
    """Take steps, change the spec, and take more. Return the updates and figures."""
    torch.manual_seed(0)
    grads = [[{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(2)] for _ in range(4)]
    simulation = gradcomp.Simulation(spec, SHAPES, **options)
    found = [simulation.step(each) for each in grads[:2]]
    getattr(simulation, how)("topk:ratio=0.3")
    return [
        *found,
        *[simulation.step(each) for each in grads[2:]],
        simulation.stats()["buckets"],
        simulation.stats()["bytes_sent"],
    ]


def are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(torch.equal(one[name], other[name]) for name in one)
    return bool(one == other)


def old_program() -> list[Any]:
    """Everything that has another name now, by its old one, as a program of version 0.1 calls it."""
    assert "topk" in gradcomp.names() and str(gradcomp.make("topk:ratio=0.02")) == "topk:ratio=0.02"
    found = simulated("sdagc:density=0.1", world=2, bucket_mb=0.0005)
    found.append(gradcomp.Simulation("topk", SHAPES, 2).stats()["compression"])
    model = DistributedDataParallel(nn.Linear(4, 3))
    handle = gradcomp.ddp.attach(model, "topk:ratio=0.5", bucket_mb=0.0005)
    handle.change("blocks")
    found += [repr(handle), handle.stats()["buckets"]]
    alone = nn.Linear(4, 3)
    local = gradcomp.local.LocalSteps(alone, torch.optim.SGD(alone.parameters(), 0.1), every=4, fragments=2)
    return [*found, local.stats()["exchanges"], len(local.state_dict()["fragments"])]


def new_program() -> list[Any]:
    """The same by the new names."""
    assert "topk" in gradcomp.list_compressors() and gradcomp.make_compressor("topk:ratio=2%") == gradcomp.make(
        "topk:ratio=0.02"
    )
    found = simulated(gradcomp.Sdagc(ratio=0.1), "set_spec", world_size=2, bucket_cap_mb=0.0005)
    found.append(gradcomp.Simulation("topk", SHAPES, world_size=2).stats()["payload_ratio"])
    model = DistributedDataParallel(nn.Linear(4, 3))
    handle = gradcomp.ddp.attach(model, gradcomp.TopK(ratio=0.5), bucket_cap_mb=0.0005)
    handle.set_spec(gradcomp.Blocks())
    found += [repr(handle), handle.stats()["buckets"]]
    alone = nn.Linear(4, 3)
    local = gradcomp.local.LocalSteps(alone, torch.optim.SGD(alone.parameters(), 0.1), sync_every=4, num_fragments=2)
    return [*found, local.stats()["exchanges"], len(local.state_dict()["fragments"])]


def test_a_program_in_the_old_names_does_what_one_in_the_new_ones_does(group_of_one: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # these old names stay
        old, new = old_program(), new_program()
    assert len(old) == len(new) and all(are_equal(one, other) for one, other in zip(old, new, strict=True))


def test_predictions_take_both_names_of_a_buckets_size() -> None:
    times = {"forward_time": 1.0, "backward_time": 1.0, "optimizer_time": 1.0}
    sizes: list[dict[str, Any]] = [{"bucket_mb": 9}, {"bucket_cap_mb": 9}]
    old, new = (gradcomp.predict({"w": (100, 10)}, 2, specs=[gradcomp.Half()], **times, **size) for size in sizes)
    assert old["none"].seconds == new["none"].seconds == 3 and old["half"].bytes == new["half"].bytes > 0


@pytest.mark.parametrize(
    "act,said",
    [
        (lambda: gradcomp.Simulation("topk", SHAPES, 2, world_size=3), "world=2 and world_size=3 are two names"),
        (lambda: gradcomp.Simulation("topk", SHAPES, 2, bucket_mb=1, bucket_cap_mb=2), "bucket_mb=1 and bucket_cap_mb=2 are"),
        (lambda: gradcomp.Sdagc(density=0.1, ratio=0.2), "ratio=0.2 and density=0.1 are two names"),
        (lambda: gradcomp.make("sdagc:density=0.1,ratio=0.2"), "the knob 'density' is given twice"),
        (lambda: gradcomp.Sdagc(ratio=2), "density=2 must be in"),
        (lambda: gradcomp.make("sdagc:ratio=200%"), "density=2 must be in"),
        (lambda: gradcomp.make("topk:ratio=1e1%"), "ratio=1e1% must be a number"),
        (lambda: gradcomp.make("blocks:bits=5%"), "bits=5% must be a whole number"),
        (lambda: gradcomp.Simulation("topk", SHAPES), "world=0 must be at least 1"),
    ],
)
def test_two_values_of_one_option_and_wrong_ones_get_a_sentence(act: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        act()


def test_equal_values_by_two_names_are_one() -> None:
    assert are_equal(simulated("topk", world=2)[0], simulated("topk", world=2, world_size=2)[0])
    assert gradcomp.Sdagc(density=0.2, ratio=0.2) == gradcomp.make("sdagc:ratio=20%").inner  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", gradcomp.names())
def test_every_compressor_is_a_class_of_the_package(name: str) -> None:
    """Also for type checkers and editors, which read the text."""
    kind = kind_of(name)
    assert kind.__name__ in gradcomp.__all__ and getattr(gradcomp, kind.__name__) is kind
    source = (ROOT / "gradcomp" / "__init__.py").read_text()
    assert f"from {kind.__module__} import {kind.__name__} as {kind.__name__}" in source
    made = gradcomp.make(kind())
    assert str(made) == str(gradcomp.make(name)) and gradcomp.describe(kind()) == gradcomp.describe(str(kind()))
    assert isinstance(made, Compressor)


def test_an_import_loads_no_torch_and_shows_all_names() -> None:
    code = "import sys, gradcomp; gradcomp.GradcompWarning; assert 'torch' not in sys.modules; print(*gradcomp.__all__)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert {"TopK", "list_compressors", "GradcompWarning"} <= {*shown} <= {*dir(gradcomp)}


def test_every_warning_is_one_of_gradcomp() -> None:
    found = 0
    for path in (ROOT / "gradcomp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warnings.warn_explicit"):
                found += 1
                assert "GradcompWarning" in [ast.unparse(each) for each in node.args], f"{path}: {ast.unparse(node)}"
    assert found >= 6 and issubclass(gradcomp.GradcompWarning, UserWarning)


@pytest.mark.parametrize(
    "spec,payload,traffic", [("dense", 1, 1), ("topk", 218.3, 109.2), ("topk:route=split", 182.9, 182.9), ("half", 2, 2)]
)
def test_a_link_of_four_hosts_carries_what_traffic_ratio_says(spec: str, payload: float, traffic: float) -> None:
    """A ring of dense sends 1.5 gradients, a gather every payload 3 times, an exchange in parts as much as a ring."""
    for of_host in (1, 2):
        simulation = gradcomp.Simulation(spec, {"w": (300_000,)}, world_size=4, ranks_per_host=of_host)
        assert simulation.stats()["traffic_ratio"] is simulation.stats()["payload_ratio"] is None
        simulation.step([{"w": torch.randn(300_000)} for _ in range(4)])
        stats = simulation.stats()
        assert stats["payload_ratio"] == stats["compression"] == pytest.approx(payload, rel=1e-3)
        if of_host == 1 or ("split" not in spec and spec != "half"):
            assert stats["traffic_ratio"] == pytest.approx(traffic, rel=1e-3)
    alone = gradcomp.Simulation(spec, {"w": (300_000,)}, 1)
    alone.step([{"w": torch.randn(300_000)}])
    assert alone.stats()["traffic_ratio"] is None


def test_blocks_is_the_default_of_every_integration() -> None:
    """By the text: not every trainer is installed. LocalSteps and Horovod's Compression are no part of it."""
    files = (
        "ddp",
        "fsdp",
        "horovod/optimizer",
        "integrations/accelerate",
        "integrations/lightning",
        "integrations/transformers",
    )
    texts = [(ROOT / "gradcomp" / f"{name}.py").read_text() for name in files]
    found = [re.findall(r'(?:spec|compression): str \| Compressor = "(\w+)"', text) for text in texts]
    assert [set(each) for each in found] == [{"blocks"}] * len(files), found
