"""A request that cannot be served is refused at once on all ranks with the reason, by each door; no rank waits for another."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
import torch.distributed as dist
from doors import COMPRESSION, DDP, DOORS, EVERY, OWN, Training
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import gradcomp

pytestmark = pytest.mark.slow

SPARSE = "ValueError: sparse gradients"
# What cannot be served, by which doors, and how the refusal begins.
CASES: list[tuple[str, tuple[str, ...], str]] = [
    ("Adasum", (COMPRESSION,), "ValueError: op=Adasum reduces parameters, not gradients"),
    ("Adasum", (OWN,), "ValueError: op=Adasum cannot be compressed"),
    *((op, DOORS, f"ValueError: op={op} cannot be compressed") for op in ("Min", "Max", "Product")),
    *(
        (f"{op} of gradients", (COMPRESSION,), f"ValueError: the optimizer reduces gradients with op={op}, which cannot be")
        for op in ("Min", "Max", "Product")
    ),
    ("sum by Adam", DOORS, r"ValueError: op=Sum .*\"blocks\""),
    ("sparse", (COMPRESSION, DDP), SPARSE),
    ("sparse as dense", (COMPRESSION,), SPARSE),
    ("float64", EVERY, r"TypeError: the parameter '\S+' is torch\.float64"),
    ("float64 gradients", DOORS, r"TypeError: the gradient of '\S+\.1\.bias' is torch\.float64"),
    (
        "complex",
        DOORS,
        r"TypeError: the parameter '\S+' is torch\.complex64; gradcomp takes real ones: keep torch\.view_as_real",
    ),
    ("unnamed", (COMPRESSION,), r"ValueError: a gradient belongs to no known parameter: its shape is \("),
    ("unnamed", (OWN,), "ValueError: named_parameters was specified, but one or more model parameters were not named"),
    ("thawed", (COMPRESSION,), r"ValueError: a gradient belongs to no known parameter: its shape is \("),
    (
        "the class",
        (COMPRESSION,),
        r"TypeError: compression= is the class Compression; pass an object: compression=Compression\(",
    ),
    ("another optimizer", (OWN,), "ValueError: the optimizer has none of named_parameters; pass those of the model that the"),
    ("no optimizer", DOORS, r"TypeError: the optimizer is a StepLR; pass a torch\.optim\.Optimizer"),
    ("no process set", DOORS, r"TypeError: process_set is a list; pass the result of hvd\.add_process_set"),
    (
        "unfrozen later",
        EVERY,
        r"RuntimeError: '\S*0\.weight' of shape \(3, 4\) was frozen when gradcomp was set up",
    ),
    ("no DDP", (DDP,), "TypeError: attach.* got a Sequential; wrap the model in DistributedDataParallel"),
    ("by position", (DDP,), r'TypeError: .* by name: gradcomp\.ddp\.attach\(model, "topk", optimizer=optimizer\)'),
    ("by position", (COMPRESSION,), r"TypeError: .* by name: gradcomp\.horovod\.Compression\(.*, bucket_mb=100\)"),
    ("optimizer as spec", (DDP,), r"TypeError: attach\(\) takes the model and the spec by position"),
    ("compiled", (DDP,), r"TypeError: .*torch\.compile\(\) has wrapped; call attach\(\) before torch\.compile"),
    ("attached twice", (DDP,), "RuntimeError: the model has a communication hook already; keep the handle of the first"),
    (
        "mixed precision",
        (DDP,),
        r"RuntimeError: DistributedDataParallel\(mixed_precision=...\) has a communication hook of its",
    ),
    ("python reducer", (DDP,), r"TypeError: .*optimize_ddp = \"python_reducer\", which gives hooks no"),
    ("other ranks", (DDP,), "ValueError: the ranks do not agree .*spec: rank 0 has 'topk:ratio=0.1', rank 1 has 'sign'"),
]
SENTENCES = {(case, door): sentence for case, own, sentence in CASES for door in own}


def linear() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def step(run: Training) -> None:
    sparse = isinstance(run.model[0], nn.Embedding)
    x = torch.tensor([doors.rank(DDP), 3]) if sparse else torch.ones(2, 4, dtype=run.model[0].weight.dtype)
    run.whole(x).sum().backward()
    run.optimizer.step()


def used(make: Callable[[], nn.Module] = linear, spec: str = "topk:ratio=0.1", **options: Any) -> Callable[[str], None]:
    return lambda door: step(Training(door, make(), spec, **options))


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def unnamed(door: str) -> None:
    model = linear()
    named = doors.named(model, "unnamed.")
    if door == OWN:
        gradcomp.horovod.DistributedOptimizer(sgd(model), named[1:], "topk")
    else:
        by_stock(model, gradcomp.horovod.Compression("topk", named[1:]), named)


def by_stock(model: nn.Module, compression: Any, named: list[tuple[str, nn.Parameter]]) -> None:
    optimizer = hvd.DistributedOptimizer(sgd(model), named, compression=compression)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def sum_by_adam(door: str) -> None:
    """Adam divides by the size of gradients, so that the sum of its steps is no step of a sum."""
    model = linear()
    step(Training(door, model, "topk", inner=torch.optim.AdamW(model.parameters()), op=hvd.Sum))


def thawed(door: str) -> None:
    model = linear()
    named = doors.named(model, "thawed.")
    model[0].weight.requires_grad_(False)
    compression = gradcomp.horovod.Compression("topk", named)
    model[0].weight.requires_grad_(True)
    by_stock(model, compression, named)


def the_class(door: str) -> None:
    model = linear()
    by_stock(model, gradcomp.horovod.Compression, doors.named(model))


def no_optimizer(door: str) -> None:
    model = linear()
    Training(door, model, "topk", inner=torch.optim.lr_scheduler.StepLR(sgd(model), 1))


def unfrozen_later(door: str) -> None:
    """Without a word, each rank would train the layer by its own gradients alone."""
    model = linear()
    model[0].weight.requires_grad_(False)
    run = Training(door, model, "topk:ratio=0.1")
    step(run)
    model[0].weight.requires_grad_(True)
    step(run)


def of_complex() -> Any:
    model: Any = linear()
    model[0].register_parameter("phases", torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    return model


def by_position(door: str) -> None:
    model: Any = linear()
    named, optimizer = doors.named(model), sgd(model)
    made: Any = gradcomp.horovod.Compression if door == COMPRESSION else gradcomp.ddp.attach
    made(*(["topk", named, optimizer] if door == COMPRESSION else [model, optimizer, "topk"]))


def compiled(door: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on importing its compiler
        whole: Any = torch.compile(Training(DDP).whole)
    gradcomp.ddp.attach(whole, "topk")


def python_reducer(door: str) -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        used()(door)


def other_ranks(door: str) -> None:
    """After the refusal, a spec can be attached on which the ranks agree."""
    run = Training(DDP, linear())
    said = small_net.refused(lambda: gradcomp.ddp.attach(run.whole, "sign" if dist.get_rank() == 1 else "topk:ratio=0.1"))
    gradcomp.ddp.attach(run.whole, "topk")
    step(run)
    raise ValueError(said.removeprefix("ValueError: "))


ACTIONS: dict[str, Callable[[str], Any]] = {
    "sparse": used(embedding, "blocks"),
    "sparse as dense": used(embedding, "blocks", sparse_as_dense=True),
    "float64": used(lambda: linear().double()),
    "float64 gradients": used(lambda: linear().double(), "blocks"),
    "complex": used(of_complex),
    "sum by Adam": sum_by_adam,
    "unnamed": unnamed,
    "thawed": thawed,
    "the class": the_class,
    "another optimizer": lambda door: Training(door, linear(), "topk", inner=sgd(linear())),
    "no optimizer": no_optimizer,
    "no process set": used(process_set=[0, 1]),
    "unfrozen later": unfrozen_later,
    "no DDP": lambda door: gradcomp.ddp.attach(linear(), "topk"),  # type: ignore[arg-type]
    "by position": by_position,
    "optimizer as spec": lambda door: gradcomp.ddp.attach(linear(), sgd(linear())),  # type: ignore[arg-type]
    "compiled": compiled,
    "attached twice": lambda door: gradcomp.ddp.attach(Training(DDP, spec="topk").whole, "topk"),
    "mixed precision": used(mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)),
    "python reducer": python_reducer,
    "other ranks": other_ranks,
}


def program() -> dict[str, Any]:
    """Ask for one impossible thing after the other on all ranks. Return the texts of the refusals."""
    hvd.init()
    ranks.join()
    found: dict[Any, Any] = {}
    for case, door in SENTENCES:
        op, _, of = case.partition(" of ")
        action = ACTIONS.get(case) or used(spec="blocks" if of else "topk:ratio=0.1", op=getattr(hvd, op))
        with warnings.catch_warnings():
            if "sparse" in case:
                warnings.simplefilter("ignore")  # torch's own, on making sparse tensors
            found[case, door] = small_net.refused(lambda a=action, d=door: a(d))  # type: ignore[misc]
    return found | {"weights": [Training(door, spec="topk:ratio=0.01").train(3) for door in EVERY]}  # after all that


@ranks.once
def said() -> list[dict[Any, Any]]:
    return ranks.launch(program, 2)


@pytest.mark.parametrize("case, door", SENTENCES)
def test_every_rank_is_told_the_reason(case: str, door: str) -> None:
    for rank in said():
        assert re.match(SENTENCES[case, door], rank[case, door]), rank[case, door]


def test_after_refusals_other_trainings_go_on() -> None:
    for first, second in zip(*(rank["weights"] for rank in said()), strict=True):
        assert first.isfinite().all() and torch.equal(first, second)


def not_initialised() -> list[str]:
    """Forget hvd.init()."""
    return [small_net.refused(lambda d=door: doors.sgd(d, linear(), "topk")) for door in DOORS]  # type: ignore[misc]


def test_a_forgotten_hvd_init_is_named() -> None:
    (both,) = ranks.launch(not_initialised, 1)
    assert both == ["ValueError: Horovod has not been initialized; use hvd.init()."] * 2
