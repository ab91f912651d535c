"""The public face: names and signatures, as users and type checkers see them. What is not here may change."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import gradcomp
from gradcomp.core.compressor import Compressor

ROOT = Path(__file__).resolve().parents[1]

FACE = """
gradcomp.BinGrad(group: 'int' = 2048, sigmas: 'float' = 0.0, route: 'str' = 'auto', form: 'str' = 'b', threshold: 'str' = 'mean') -> None
gradcomp.Blocks(bits: 'int' = 5, route: 'str' = 'auto') -> None
gradcomp.Dense() -> None
gradcomp.GTopK(ratio: 'float' = 0.01) -> None
gradcomp.GradcompWarning
gradcomp.GsSgd(ratio: 'float' = 0.01, candidates: 'int' = 4, rows: 'int' = 5, columns: 'int' = 0, compression: 'float' = 0.0) -> None
gradcomp.Half(form: 'str' = 'bf16', route: 'str' = 'auto') -> None
gradcomp.Lgc(ratio: 'float' = 0.01, instance: 'str' = 'ring', dense: 'int' = 200, learn: 'int' = 300, first: 'str' = 'auto', innovation: 'float' = 1e-05, bands: 'int' = 16, window: 'int' = 4096, max_code_error: 'float' = 0.9, wire: 'str' = 'compact') -> None
gradcomp.Linear(group: 'int' = 2048, sigmas: 'float' = 0.0, route: 'str' = 'auto', levels: 'int' = 5, spacing: 'str' = 'minmax') -> None
gradcomp.Orq(group: 'int' = 2048, sigmas: 'float' = 0.0, route: 'str' = 'auto', levels: 'int' = 3) -> None
gradcomp.Qsgd(group: 'int' = 2048, sigmas: 'float' = 0.0, route: 'str' = 'auto', levels: 'int' = 5, norm: 'str' = 'l2') -> None
gradcomp.Sdagc(density: 'float' = 0.01, lam: 'float | str' = 'auto', scope: 'str' = 'bucket', small: 'str' = 'none', cap: 'float' = 0.05, flush: 'int' = 0, sam: 'float' = 0.0, lr_revision: 'str' = 'none', route: 'str' = 'allgather', wire: 'str' = 'compact', ratio: 'InitVar[float | None]' = None) -> None
gradcomp.Sign(group: 'int' = 2048, sigmas: 'float' = 0.0, route: 'str' = 'auto') -> None
gradcomp.Simulation(spec: 'str | Compressor', shapes: 'Mapping[str, Sequence[int]]', world: 'int | None' = None, seed: 'int' = 0, *, world_size: 'int | None' = None, bucket_mb: 'float | None' = None, bucket_cap_mb: 'float | None' = None, device: 'str | torch.device' = 'cpu', ranks_per_host: 'int' = 1, optimizer: 'torch.optim.Optimizer | None' = None, named_parameters: 'Iterable[tuple[str, torch.nn.Parameter]] | None' = None)
gradcomp.Simulation.change(spec: 'str | Compressor') -> 'None'
gradcomp.Simulation.load_state_dict(state: 'Mapping[str, Any] | Sequence[Mapping[str, Any]]') -> 'None'
gradcomp.Simulation.residual(rank: 'int') -> 'dict[str, Tensor]'
gradcomp.Simulation.set_spec(spec: 'str | Compressor') -> 'None'
gradcomp.Simulation.state_dict() -> 'dict[str, Any]'
gradcomp.Simulation.stats() -> 'Stats'
gradcomp.Simulation.step(grads: 'Sequence[Mapping[str, Tensor | None]]') -> 'dict[str, Tensor]'
gradcomp.SketchedSgd(ratio: 'float' = 0.01, candidates: 'int' = 4, rows: 'int' = 5, columns: 'int' = 0, compression: 'float' = 0.0) -> None
gradcomp.TernGrad(group: 'int' = 2048, sigmas: 'float' = 2.5, route: 'str' = 'auto') -> None
gradcomp.TopK(ratio: 'float' = 0.01, route: 'str' = 'allgather', wire: 'str' = 'compact') -> None
gradcomp.by_layer(rules: 'Mapping[str, str | Compressor]', default: 'str | Compressor') -> 'Compressor'
gradcomp.ddp.attach(model: DistributedDataParallel, spec: str | Compressor = blocks, *, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None, scaler: torch.amp.GradScaler | None = None, bucket_mb: float | None = None, bucket_cap_mb: float | None = None, seed: int = 0) -> Handle
gradcomp.describe(name: 'str | Compressor') -> 'str'
gradcomp.fsdp.attach(model: 'torch.nn.Module', spec: 'str | Compressor' = 'blocks', *, weights: 'str | Compressor | None' = None, replicas: 'DeviceMesh | dist.ProcessGroup | None' = None, seed: 'int' = 0) -> 'Handle'
gradcomp.handle.Handle.change(spec: 'str | Compressor') -> 'None'
gradcomp.handle.Handle.load_state_dict(state: 'Mapping[str, Any] | Sequence[Mapping[str, Any]]') -> 'None'
gradcomp.handle.Handle.remove() -> 'None'
gradcomp.handle.Handle.residual() -> 'dict[str, Tensor]'
gradcomp.handle.Handle.set_spec(spec: 'str | Compressor') -> 'None'
gradcomp.handle.Handle.state_dict() -> 'dict[str, Any]'
gradcomp.handle.Handle.stats() -> 'Stats'
gradcomp.horovod.Compression(spec: 'str | Compressor', named_parameters: 'Iterable[tuple[str, torch.nn.Parameter]]', *, process_set: 'hvd.ProcessSet | None' = None, optimizer: 'torch.optim.Optimizer | None' = None, scaler: 'torch.amp.GradScaler | None' = None, bucket_mb: 'float | None' = None, bucket_cap_mb: 'float | None' = None, seed: 'int' = 0)
gradcomp.horovod.Compression.compress(tensor: 'Tensor | None' = None) -> 'tuple[Tensor, Slot | None]'
gradcomp.horovod.Compression.decompress(tensor: 'Tensor', ctx: 'Slot | None') -> 'Tensor'
gradcomp.horovod.DistributedOptimizer(optimizer: 'torch.optim.Optimizer', named_parameters: 'Iterable[tuple[str, torch.nn.Parameter]] | None' = None, compression: 'str | Compressor' = 'blocks', *, scaler: 'torch.amp.GradScaler | None' = None, bucket_mb: 'float | None' = None, bucket_cap_mb: 'float | None' = None, seed: 'int' = 0, **stock_options: 'Any') -> 'CompressedOptimizer'
gradcomp.list_compressors() -> 'list[str]'
gradcomp.local.LocalSteps(model: 'torch.nn.Module', optimizer: 'torch.optim.Optimizer', spec: 'str | Compressor' = 'sign', *, every: 'int | None' = None, sync_every: 'int | None' = None, outer_lr: 'float | None' = None, outer_momentum: 'float | None' = None, rounds: 'int | None' = None, fragments: 'int | None' = None, num_fragments: 'int | None' = None, seed: 'int' = 0)
gradcomp.local.LocalSteps.flush() -> 'None'
gradcomp.local.LocalSteps.load_state_dict(state: 'Mapping[str, Any] | Sequence[Mapping[str, Any]]') -> 'None'
gradcomp.local.LocalSteps.param_groups() -> 'list[dict[str, Any]]'
gradcomp.local.LocalSteps.state_dict() -> 'dict[str, Any]'
gradcomp.local.LocalSteps.stats() -> 'LocalStats'
gradcomp.local.LocalSteps.step(closure: 'Callable[[], Any] | None' = None) -> 'Any'
gradcomp.local.LocalSteps.zero_grad(set_to_none: 'bool' = True) -> 'None'
gradcomp.make(spec: 'str | Compressor') -> 'Compressor'
gradcomp.make_compressor(spec: 'str | Compressor') -> 'Compressor'
gradcomp.names() -> 'list[str]'
gradcomp.predict(model: 'nn.Module | Mapping[str, Sequence[int]]', ranks: 'int', *, hosts: 'int | None' = None, link: 'str | Link' = '10Gbit/s', latency: 'str' = '50us', forward_time: 'float', backward_time: 'float', optimizer_time: 'float' = 0.0, specs: 'Sequence[str | Compressor] | None' = None, fsdp: 'bool' = False, bucket_mb: 'float | None' = None, bucket_cap_mb: 'float | None' = None, device: 'str | torch.device | None' = None, tell: 'Tell | None' = None) -> 'Prediction'
gradcomp.telemetry.JsonLines(folder: 'str | Path')
gradcomp.telemetry.TensorBoard(folder: 'str | Path')
gradcomp.telemetry.numbers(record: Record) -> dict[str, float]
gradcomp.telemetry.watch(exchange: 'Any', *writers: 'Writer', every: 'int' = 50, check: 'int' = 1000) -> 'None'
"""  # noqa: E501


def members(owner: Any, name: str, own: type) -> list[str]:
    """The signatures of a class and of its public methods, without self."""
    signature = inspect.signature(own)
    lines = (
        [f"{name}{signature.replace(return_annotation=inspect.Signature.empty)}"] if own.__init__ is not object.__init__ else []
    )
    for method, value in vars(own).items():
        if not method.startswith("_"):
            found = inspect.signature(value.fget if isinstance(value, property) else value)
            lines.append(f"{name}.{method}{found.replace(parameters=list(found.parameters.values())[1:])}")
    return lines


def face() -> list[str]:
    lines = []
    for owner, names in {
        "gradcomp": gradcomp.__all__,
        "gradcomp.ddp": gradcomp.ddp.__all__,
        "gradcomp.fsdp": gradcomp.fsdp.__all__,
        "gradcomp.handle": ["Handle"],
        "gradcomp.horovod": gradcomp.horovod.__all__,
        "gradcomp.local": gradcomp.local.__all__,
        "gradcomp.telemetry": gradcomp.telemetry.__all__,
    }.items():
        for name in names:
            value = getattr(sys.modules[owner], name)
            if inspect.isclass(value) and issubclass(value, Warning):
                lines.append(f"{owner}.{name}")
            elif inspect.isclass(value) and not issubclass(value, Compressor):
                lines += members(owner, f"{owner}.{name}", value)
            elif callable(value):
                lines.append(f"{owner}.{name}{inspect.signature(value)}")
    return sorted(lines)


def plain(line: str) -> str:
    """Without quotes and modules: annotations of ddp are types, because torch compares a hook's with types."""
    line = line.replace("'", "").replace("torch.optim.optimizer.", "torch.optim.")
    for module in ("collections.abc.", "typing.", "torch.nn.parallel.distributed.", "gradcomp.core.compressor."):
        line = line.replace(module, "")
    return line.replace("-> gradcomp.handle.Handle", "-> Handle").replace("torch.Tensor", "Tensor")


def test_the_public_names_and_signatures_are_these() -> None:
    assert [plain(line) for line in face() if "handle.Handle(" not in line] == [
        plain(line) for line in FACE.strip().splitlines()
    ]


def test_compression_is_a_handle_that_horovod_can_call() -> None:
    own = {name for name in dir(gradcomp.horovod.Compression) if not name.startswith("_")}
    assert own - set(dir(gradcomp.handle.Handle)) == {"compress", "decompress"}


def test_attributes_of_doors_are_private() -> None:
    """Nothing that an object of a door keeps is public, but the figure that a simulation documents."""
    for module in ("handle", "ddp", "fsdp", "local", "horovod/compression", "horovod/optimizer", "simulate"):
        tree = ast.parse((ROOT / "gradcomp" / f"{module}.py").read_text())
        public = {
            node.attr
            for kind in tree.body
            if isinstance(kind, ast.ClassDef) and not kind.name.startswith("_")
            if not any(ast.unparse(base).endswith("Door") for base in kind.bases)  # which no user is given
            for node in ast.walk(kind)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
        }
        assert {name for name in public if not name.startswith("_")} <= {"bytes_sent"}, module
    assert dir(gradcomp.horovod) == ["Compression", "DistributedOptimizer"] and dir(gradcomp.ddp) == ["attach"]


def test_help_works_where_horovod_is_missing() -> None:
    code = (
        "import sys; sys.modules['horovod'] = None; import pydoc, gradcomp; pydoc.render_doc(gradcomp); print(*dir(gradcomp))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "ddp" in shown and "horovod" not in shown


def test_dir_shows_the_doors() -> None:
    pytest.importorskip("horovod.torch", reason="dir() was NOT tested: Horovod is not installed")
    code = "import gradcomp, sys; assert 'horovod' not in sys.modules; print(*dir(gradcomp))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(shown) == {*gradcomp.__all__, "ddp", "fsdp", "horovod", "local"}


def test_doors_are_typed(tmp_path: Path) -> None:
    """A type checker sees both doors, what they return, and what it can be asked for; and that there is nothing else."""
    pytest.importorskip("mypy", reason="types of the doors were NOT tested: mypy is not installed")
    program = tmp_path / "user.py"
    program.write_text(
        textwrap.dedent(
            """
            import gradcomp
            import torch
            from torch.nn.parallel import DistributedDataParallel

            def right(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
                handle = gradcomp.ddp.attach(model, "topk")
                reveal_type(handle)
                handle.set_spec(gradcomp.TopK(ratio=0.01))
                gradcomp.Sdagc(ratio=0.01)
                handle.remove()
                reveal_type(handle.residual())
                distributed = gradcomp.horovod.DistributedOptimizer(optimizer, model.named_parameters(), "topk")
                reveal_type(distributed.compression)
                reveal_type(distributed.step)
                distributed.synchronize()

            def wrong(model: DistributedDataParallel) -> None:
                gradcomp.ddp.attach(model, "topk").put
                gradcomp.horovod.Compression("topk", model.named_parameters()).finish
                gradcomp.ddp.attach(model, 3)
                gradcomp.TopK(share=0.01)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--scripts-are-modules", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    said = done.stdout
    for type_ in (
        '"gradcomp.handle.Handle"',
        '"dict[str, torch._tensor.Tensor]"',
        '"gradcomp.horovod.compression.Compression"',
    ):
        assert f"Revealed type is {type_}".replace("dict[str", "dict[str") in said.replace("builtins.", ""), said
    for wrong in (
        '"Handle" has no attribute "put"',
        '"Compression" has no attribute "finish"',
        'incompatible type "int"',
        '"share" for "TopK"',
    ):
        assert wrong in said, said


def test_a_simulation_shows_only_documented_names() -> None:
    shown = {name for name in dir(gradcomp.Simulation("topk", {"w": (3,)}, 1)) if not name.startswith("_")}
    assert shown == {"bytes_sent", "change", "load_state_dict", "residual", "set_spec", "state_dict", "stats", "step"}


@pytest.mark.parametrize(
    "spec", ["topk:ratio=0.1", "sign", "blocks", "bingrad", "terngrad", "sdagc:lam=1,small=none", "gtopk:ratio=0.1"]
)
def test_without_error_feedback_a_step_knows_nothing_of_the_last(spec: str) -> None:
    """Unsent entries are lost: equal gradients give equal updates after any steps, and the residual is zero."""
    torch.manual_seed(0)
    before, grads = ([{"w": torch.randn(200)} for _ in range(3)] for _ in range(2))
    worn, fresh = (
        gradcomp.Simulation(f"{spec},feedback=false" if ":" in spec else f"{spec}:feedback=false", {"w": (200,)}, 3)
        for _ in range(2)
    )
    worn.step(before)
    if spec == "terngrad":  # its draws are another step's
        fresh.step([{"w": torch.zeros(200)} for _ in range(3)])
    ours, theirs = worn.step(grads)["w"], fresh.step(grads)["w"]
    assert torch.equal(ours, theirs) and ours.any()
    assert not worn.residual(0)["w"].any() and "feedback" not in worn.state_dict()["of_rank"]["0"]["layers"]


def test_a_change_that_would_lose_the_residual_is_refused() -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.1", {"w": (10,)}, 1)
    simulation.step([{"w": torch.ones(10)}])
    with pytest.raises(ValueError, match="would lose the residual"):
        simulation.change("sign:feedback=false")
    simulation.change("orq:sigmas=1.5")
    assert simulation.state_dict()["spec"] == "orq:sigmas=1.5,feedback=true"
