"""The trainers' doors without their packages: refusals and arguments by stand-ins, and the files beside a checkpoint."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gradcomp.integrations import beside

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("accelerate", "lightning", "transformers")


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


@dataclass
class DdpKwargs:
    find_unused_parameters: bool = False
    comm_hook: str = "no"

    def to_kwargs(self) -> dict[str, Any]:
        return {"find_unused_parameters": self.find_unused_parameters}


class DDPStrategy:
    def __init__(self, **options: Any):
        self.options = options


def stand_ins(way: str = "MULTI_CPU", **versions: str) -> dict[str, ModuleType]:
    """Make modules with what the doors import. way: how Accelerate trains."""
    state = SimpleNamespace(_shared_state={"distributed_type": SimpleNamespace(value=way)})
    version = {package: {"__version__": versions.get(package, f"{beside.TESTED[package]}.0")} for package in PACKAGES}
    return {
        "accelerate": module("accelerate", Accelerator=type("Accelerator", (), {}), **version["accelerate"]),
        "accelerate.state": module("accelerate.state", AcceleratorState=state),
        "accelerate.utils": module("accelerate.utils", DistributedDataParallelKwargs=DdpKwargs),
        "transformers": module("transformers", Trainer=object, **version["transformers"]),
        "lightning": module("lightning", Trainer=object, LightningModule=object, **version["lightning"]),
        "lightning.pytorch": module("lightning.pytorch"),
        "lightning.pytorch.callbacks": module("lightning.pytorch.callbacks", Callback=object),
        "lightning.pytorch.strategies": module("lightning.pytorch.strategies", DDPStrategy=DDPStrategy),
    }


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a door beside stand-ins of its packages, as often as a test asks."""

    def load(name: str, **facts: str) -> Any:
        beside.check_version.cache_clear()
        for each, made in stand_ins(**facts).items():
            monkeypatch.setitem(sys.modules, each, made)
        for own in ("accelerate", name):
            monkeypatch.delitem(sys.modules, f"gradcomp.integrations.{own}", raising=False)
        return importlib.import_module(f"gradcomp.integrations.{name}")

    yield load
    for name in PACKAGES:
        sys.modules.pop(f"gradcomp.integrations.{name}", None)


def trainer(**args: Any) -> Any:
    old = DdpKwargs(find_unused_parameters=True)
    names = ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "log", "training_step")
    methods: dict[str, Any] = {name: lambda *given: None for name in names}
    facts = SimpleNamespace(**{"n_gpu": 1, **args})
    made = SimpleNamespace(args=facts, state=SimpleNamespace(global_step=0), **methods)
    made.create_accelerator_and_postprocess = lambda: setattr(made, "accelerator", SimpleNamespace(ddp_handler=old))
    made.create_accelerator_and_postprocess()
    return made


def test_gradcomp_imports_no_trainer_and_a_missing_one_gets_a_sentence() -> None:
    code = """
import sys
for name in ("accelerate", "lightning", "transformers"):
    sys.modules[name] = None
import gradcomp, gradcomp.ddp
assert not any(name.startswith("gradcomp.integrations") for name in sys.modules)
for name in ("accelerate", "lightning", "transformers"):
    try:
        __import__(f"gradcomp.integrations.{name}")
    except ImportError as error:
        assert "pip install " in str(error) and str(error).endswith(name) and error.name == name, error
        assert ("import Trainer from lightning.pytorch, not from pytorch_lightning" in str(error)) == (name == "lightning")
    else:
        raise AssertionError(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("way", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_ways_without_ddp_are_refused(door: Any, way: str) -> None:
    with pytest.raises(ValueError, match=f"runs as {way}.*torchrun"):
        door("accelerate", way=way).Handler("topk")
    with pytest.raises(ValueError, match=f"runs as {way}"):
        door("transformers", way=way).attach(trainer(), "topk")


def test_the_trainer_keeps_its_ddp_options_and_has_a_handle_later(door: Any) -> None:
    given = trainer()
    handle = door("transformers").attach(given, "topk")
    handler = given.accelerator.ddp_handler
    assert handler.find_unused_parameters and handler.to_dict() == {"find_unused_parameters": True}
    with pytest.raises(RuntimeError, match="no model has been wrapped"):
        handle.stats()
    logs = {"loss": 1.0, "grad_norm": 300.0}
    given.log(logs)  # nothing is exchanged yet
    assert logs == {"loss": 1.0, "grad_norm": 300.0} and handler.figures() == {}


@pytest.mark.parametrize("keeps_state, taken", [(True, False), (False, True), (False, False)])
def test_the_trainers_norm_is_that_of_gradients_also_where_they_hold_updates(door: Any, keeps_state: bool, taken: bool) -> None:
    """Without state and momentum, gradients hold the mean gradient, and the Trainer's norm is right."""
    given = trainer()
    door("transformers").attach(given, "topk")
    own = {"bytes_sent": 12, "grad_norm": 0.5, "compression": 70.0}
    session = SimpleNamespace(reducer=SimpleNamespace(keeps_state=keeps_state), view=SimpleNamespace(taken=taken))
    asked: list[int] = []
    handle = SimpleNamespace(stats=lambda: asked.append(given.state.global_step) or own, _session=session)
    handler = given.accelerator.ddp_handler
    handler._models, handler._handles = [None], [handle]
    for given.state.global_step in range(120):
        given.training_step(None, {})
    assert asked == [0, 50, 100], "the norm is measured in all steps"
    for logs in ({"loss": 1.0, "grad_norm": 300.0}, {"loss": 1.0}, {"eval_loss": 1.0, "grad_norm": 300.0}):
        given.log(logs)
        wanted = 300.0 if "eval_loss" in logs or not (keeps_state or taken) else 0.5
        assert logs.get("grad_norm", wanted) == wanted
        assert logs.get("gradcomp/grad_norm") == (0.5 if "loss" in logs else None)


def test_each_trial_of_a_search_has_a_handler_of_its_own(door: Any) -> None:
    given = trainer()
    door("transformers").attach(given, "topk:ratio=0.5")
    first = given.accelerator.ddp_handler
    given.create_accelerator_and_postprocess()  # as hyperparameter_search() does
    second = given.accelerator.ddp_handler
    assert second is not first and second.find_unused_parameters and second._spec == first._spec == "topk:ratio=0.5"
    given.log({"loss": 1.0})


def test_several_devices_in_one_process_are_refused(door: Any) -> None:
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 4"):
        door("transformers").attach(trainer(n_gpu=4))
    sharded = trainer()
    sharded.is_distributed_loading_by_transformers = True
    with pytest.raises(ValueError, match="loaded in shards"):
        door("transformers").attach(sharded)


@pytest.mark.parametrize("option", ["ddp_comm_hook", "ddp_comm_state", "model_averaging_period"])
def test_a_second_communication_hook_is_refused(door: Any, option: str) -> None:
    strategy = door("lightning").GradcompStrategy
    with pytest.raises(ValueError, match=option):
        strategy("topk", **{option: object()})
    made = strategy("topk", find_unused_parameters=True)
    assert made.options == {"find_unused_parameters": True} and made.handle is None


@pytest.mark.parametrize("package", PACKAGES)
def test_a_newer_version_is_warned_of_once(door: Any, package: str) -> None:
    def make(version: str) -> None:
        loaded = door(package, **{package: version})
        acts = {"accelerate": lambda: loaded.Handler(), "lightning": lambda: loaded.GradcompStrategy()}
        acts.get(package, lambda: loaded.attach(trainer()))()

    major, minor = beside.TESTED[package].split(".")
    for version in (f"{major}.{minor}.9", f"{major}.{int(minor) - 1}.0", f"{int(major) - 1}.99.0"):
        make(version)
    for version in (f"{major}.{int(minor) + 1}.0rc1", f"{int(major) + 1}.0.0.dev0"):
        with pytest.warns(UserWarning, match=f"{package} {version} is newer than {package} {major}.{minor}"):
            make(version)
    beside.check_version(package, f"{int(major) + 1}.0.0.dev0")  # said already


def test_the_page_names_the_tested_versions() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text()
    for package, version in beside.TESTED.items():
        assert f"| `from gradcomp.integrations.{package} import " in page
        assert re.search(rf"\| `pip install ([a-z]+ )?{package}` \| {version} \|", page)


class Held:
    """A handle of one rank of several, as far as files go."""

    def __init__(self, rank: int, ranks: int):
        world = SimpleNamespace(rank=rank, size=ranks)
        self._session = SimpleNamespace(network=SimpleNamespace(world=world))
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        world = self._session.network.world
        return {"ranks": world.size, "of_rank": {str(world.rank): {"residual": torch.full((2,), float(world.rank))}}}

    def load_state_dict(self, states: Any) -> None:
        self.loaded = [*states["of_rank"]] if isinstance(states, dict) else [[*state["of_rank"]] for state in states]


def saved(stem: str, ranks: int) -> None:
    for rank in reversed(range(ranks)):
        beside.save(Held(rank, ranks), stem)


def test_each_rank_loads_its_own_file_and_another_number_of_ranks_loads_all(tmp_path: Path) -> None:
    stem = f"{tmp_path}/new folder/epoch=[0].ckpt.rank"  # a name with what glob reads as a pattern
    saved(stem, 2)
    (tmp_path / "new folder" / "epoch=[0].ckpt.rank-other.pt").touch()
    for rank in range(2):
        own = Held(rank, 2)
        assert beside.load(own, stem) and own.loaded == [str(rank)]
    for ranks in (1, 3):
        other = Held(ranks - 1, ranks)
        assert beside.load(other, stem) and other.loaded == [["0"], ["1"]]
    beside.remove(stem)
    assert not beside.load(Held(0, 2), stem), "a checkpoint without files is of a training without gradcomp"
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == ["epoch=[0].ckpt.rank-other.pt"]


def test_fewer_ranks_leave_no_file_of_a_rank_that_there_is_no_more(tmp_path: Path) -> None:
    saved(f"{tmp_path}/rank", 3)
    saved(f"{tmp_path}/rank", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.pt", "rank1.pt"]


def test_files_of_a_save_that_did_not_end_are_refused(tmp_path: Path) -> None:
    saved(f"{tmp_path}/rank", 3)
    (tmp_path / "rank1.pt").unlink()
    for ranks in (2, 3):
        with pytest.raises(ValueError, match=r"states of 2 of 3 ranks.*older checkpoint"):
            beside.load(Held(1, ranks), f"{tmp_path}/rank")
    own = Held(2, 3)
    assert beside.load(own, f"{tmp_path}/rank") and own.loaded == ["2"]  # as on hosts with folders of their own


def test_optimizers_are_found_within_what_trainers_wrap_around_them() -> None:
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
    sgd, adam = torch.optim.SGD(first.parameters(), 0.1), torch.optim.AdamW(second.parameters())
    wrapped = [SimpleNamespace(optimizer=sgd), adam]
    assert beside.optimizers_of(first, wrapped) == [sgd]
    assert beside.optimizers_of(torch.nn.Sequential(first, second), wrapped) == [sgd, adam]
    assert beside.optimizers_of(torch.nn.Linear(1, 1), wrapped) is None


def test_figures_are_numbers_and_few() -> None:
    stats = {"compression": None, "bytes_sent": 12, "grad_norm": 0.5, "exchanges": "gradients"}
    handle: Any = SimpleNamespace(stats=lambda: stats)
    assert beside.figures(handle) == {"gradcomp/bytes_sent": 12.0, "gradcomp/grad_norm": 0.5}
