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

from gradcomp.integrations import common

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
    bucket_cap_mb: float | None = None

    def to_kwargs(self) -> dict[str, Any]:
        return {"find_unused_parameters": self.find_unused_parameters}  # what differs from the defaults


class DDPStrategy:
    optimizers = ()

    def __init__(self, **options: Any):
        self.options = options

    def load_checkpoint(self, checkpoint_path: Any) -> dict[str, Any]:
        return {}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        pass


def stand_ins(way: str = "MULTI_CPU", **versions: str) -> dict[str, ModuleType]:
    """Make modules with what the doors import. way: how Accelerate trains."""
    state = SimpleNamespace(_shared_state={"distributed_type": SimpleNamespace(value=way)})
    version = {package: {"__version__": versions.get(package, f"{common.TESTED[package]}.0")} for package in PACKAGES}
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
        common.check_version.cache_clear()
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
    names = ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "log")
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
    assert handler.find_unused_parameters and handler.to_dict()["find_unused_parameters"]
    with pytest.raises(RuntimeError, match="no model has been wrapped"):
        handle.stats()
    logs = {"loss": 1.0, "grad_norm": 300.0}
    given.log(logs)  # nothing is exchanged yet
    assert logs == {"loss": 1.0, "grad_norm": 300.0} and handler.figures() == {}


def test_an_accelerator_keeps_its_ddp_options_and_has_a_handle_later(door: Any) -> None:
    accelerator = trainer().accelerator
    handle = door("accelerate").attach(accelerator, "topk", bucket_cap_mb=50)
    handler = accelerator.ddp_handler
    assert handler.find_unused_parameters and handler.bucket_cap_mb == handler._bucket_mb == 50
    with pytest.raises(RuntimeError, match="no model has been wrapped"):
        handle.remove()
    assert door("lightning").GradcompStrategy("topk", bucket_cap_mb=50)._bucket_mb == 50
    given = trainer()
    door("transformers").attach(given, "topk", bucket_cap_mb=10)
    assert given.accelerator.ddp_handler._bucket_mb == 10


def test_the_trainers_own_norm_stays_in_its_logs(door: Any) -> None:
    """Gradients stay gradients until step(), so that it is right. Ours stands beside it."""
    given = trainer()
    door("transformers").attach(given, "topk")
    own = {"bytes_sent": 12, "grad_norm": 0.5, "compression": 70.0}
    handler = given.accelerator.ddp_handler
    handler._models, handler._handles = [None], [SimpleNamespace(stats=lambda: own, _is_removed=False)]
    for logs in ({"loss": 1.0, "grad_norm": 300.0}, {"loss": 1.0}, {"eval_loss": 1.0, "grad_norm": 300.0}):
        before = dict(logs)
        given.log(logs)
        figures = {name: value for name, value in logs.items() if name.startswith("gradcomp/")}
        assert logs == before | figures
        wanted = {"gradcomp/compression": 70.0, "gradcomp/bytes_sent": 12.0, "gradcomp/grad_norm": 0.5}
        assert figures == (wanted if "loss" in before else {})


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

    major, minor = common.TESTED[package].split(".")
    for version in (f"{major}.{minor}.9", f"{major}.{int(minor) - 1}.0", f"{int(major) - 1}.99.0"):
        make(version)
    for version in (f"{major}.{int(minor) + 1}.0rc1", f"{int(major) + 1}.0.0.dev0"):
        with pytest.warns(UserWarning, match=f"{package} {version} is newer than {package} {major}.{minor}"):
            make(version)
    common.check_version(package, f"{int(major) + 1}.0.0.dev0")  # said already


def test_the_page_names_the_tested_versions() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text()
    for package, version in common.TESTED.items():
        assert f"| `from gradcomp.integrations.{package} import " in page
        assert re.search(rf"\| `pip install ([a-z]+ )?{package}` \| {version} \|", page)


class Held:
    """A handle of one rank of several, as far as files go."""

    _is_removed = False

    def __init__(self, rank: int, ranks: int, *, on_updates: bool = False):
        world, reducer = SimpleNamespace(rank=rank, size=ranks), SimpleNamespace(on_updates=on_updates)
        self._session = SimpleNamespace(network=SimpleNamespace(world=world), reducer=reducer)
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        world = self._session.network.world
        return {"ranks": world.size, "of_rank": {str(world.rank): {"residual": torch.full((2,), float(world.rank))}}}

    def load_state_dict(self, states: Any) -> None:
        self.loaded = [*states["of_rank"]] if isinstance(states, dict) else [[*state["of_rank"]] for state in states]


def saved(stem: str, ranks: int) -> None:
    for rank in reversed(range(ranks)):
        common.save(Held(rank, ranks), stem)


def test_each_rank_loads_its_own_file_and_another_number_of_ranks_loads_all(tmp_path: Path) -> None:
    stem = f"{tmp_path}/new folder/epoch=[0].ckpt.rank"  # a name with what glob reads as a pattern
    saved(stem, 2)
    (tmp_path / "new folder" / "epoch=[0].ckpt.rank-other.pt").touch()
    for rank in range(2):
        own = Held(rank, 2)
        assert common.load(own, stem) and own.loaded == [str(rank)]
    for ranks in (1, 3):
        other = Held(ranks - 1, ranks)
        assert common.load(other, stem) and other.loaded == [["0"], ["1"]]
    common.remove(stem)
    assert not common.load(Held(0, 2), stem), "a checkpoint without files is of a training without gradcomp"
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
            common.load(Held(1, ranks), f"{tmp_path}/rank")
    own = Held(2, 3)
    assert common.load(own, f"{tmp_path}/rank") and own.loaded == ["2"]  # as on hosts with folders of their own


def test_a_checkpoint_that_is_a_link_has_the_files_of_its_target(door: Any, tmp_path: Path) -> None:
    """Lightning's ModelCheckpoint(save_last="link") makes one."""
    saved(f"{tmp_path}/epoch=1.ckpt.gradcomp-rank", 2)
    (tmp_path / "epoch=1.ckpt").touch()
    (tmp_path / "last.ckpt").symlink_to("epoch=1.ckpt")
    strategy = door("lightning").GradcompStrategy()
    strategy.handle = Held(1, 2)
    strategy.load_checkpoint(f"{tmp_path}/last.ckpt")
    strategy.load_optimizer_state_dict({})
    assert strategy.handle.loaded == ["1"]


def test_a_checkpoint_whose_files_are_missing_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=re.escape(f"there is no {tmp_path}/rank*.pt")):
        assert not common.load(Held(0, 2, on_updates=True), f"{tmp_path}/rank")


def test_a_handle_that_was_removed_has_no_files_and_no_figures(tmp_path: Path) -> None:
    """Files of before would be loaded beside a checkpoint of later weights."""
    handle = Held(0, 1, on_updates=True)
    common.save(handle, f"{tmp_path}/rank")
    assert [*tmp_path.iterdir()]
    handle._is_removed, handle._session = True, SimpleNamespace(kept=handle._session)
    common.save(handle, f"{tmp_path}/rank")
    assert not common.load(handle, f"{tmp_path}/rank") and not [*tmp_path.iterdir()]
    assert common.figures(handle) == {} and common.own_optimizers([handle], [stepped(1.0)]) == []


def stepped(slope: float) -> torch.optim.SGD:
    """Make an optimizer whose moment is this slope."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), slope)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.step()
    return optimizer


def moment(optimizer: torch.optim.Optimizer) -> float:
    (state,) = optimizer.state_dict()["state"].values()
    return float(state["momentum_buffer"][0])


def test_each_rank_gets_its_own_optimizer_back(tmp_path: Path) -> None:
    """A rank that is new keeps what the trainer has loaded, which is rank 0's."""
    for rank in range(2):
        common.save(Held(rank, 2), f"{tmp_path}/rank", [stepped(1.0 + rank)])
    for ranks, wanted in ((2, [1.0, 2.0]), (1, [1.0]), (3, [1.0, 2.0, 9.0])):
        for rank, of_rank in enumerate(wanted):
            optimizer = stepped(9.0)
            assert common.load(Held(rank, ranks), f"{tmp_path}/rank", [optimizer]) and moment(optimizer) == of_rank
    saved(f"{tmp_path}/rank", 2)  # of gradients: the trainer's own states are those of all ranks
    optimizer = stepped(9.0)
    assert common.load(Held(1, 2), f"{tmp_path}/rank", [optimizer]) and moment(optimizer) == 9.0


def test_optimizers_are_saved_for_each_rank_where_updates_are_exchanged() -> None:
    optimizer = stepped(1.0)
    for on_updates, found in ((True, [optimizer, optimizer]), (False, [])):
        handle: Any = SimpleNamespace(
            _is_removed=False, _session=SimpleNamespace(reducer=SimpleNamespace(on_updates=on_updates))
        )
        assert common.own_optimizers([handle], [SimpleNamespace(optimizer=optimizer), optimizer]) == found


def test_a_ranks_states_are_loaded_after_the_trainers_own(door: Any) -> None:
    acts: list[str] = []
    given = trainer()
    given._load_optimizer_and_scheduler = lambda folder: acts.append(f"trainer {folder}")
    door("transformers").attach(given, "topk")
    given.accelerator.ddp_handler.load = lambda folder: acts.append(f"rank {folder}")
    for folder in (None, "first"):  # the Trainer calls it at every beginning
        given._load_optimizer_and_scheduler(folder)
    handler = door("accelerate").Handler("topk")

    class Accelerator(sys.modules["accelerate"].Accelerator):  # type: ignore[name-defined, misc]
        _models: Any = ()

        def prepare(self, model: torch.nn.Module) -> None:
            handler.register_comm_hook(model)

        def register_save_state_pre_hook(self, hook: Any) -> None:
            pass

        def register_load_state_pre_hook(self, hook: Any) -> None:
            self.hook = hook

        def load_state(self, folder: str) -> None:
            self.hook([], folder)
            acts.append(f"trainer {folder}")

    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(1, 1))
    handler.load = lambda folder: acts.append(f"rank {folder}")
    accelerator.load_state("second")
    assert acts == ["trainer None", "trainer first", "rank first", "trainer second", "rank second"]


def test_figures_are_numbers_and_few() -> None:
    stats = {"compression": None, "bytes_sent": 12, "grad_norm": 0.5, "exchanges": "gradients"}
    handle: Any = SimpleNamespace(stats=lambda: stats, _is_removed=False)
    assert common.figures(handle) == {"gradcomp/bytes_sent": 12.0, "gradcomp/grad_norm": 0.5}
