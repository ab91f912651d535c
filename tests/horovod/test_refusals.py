"""A request that cannot be served is refused at once on all ranks with the reason; no rank waits for another."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from torch import Tensor, nn

import gradcomp

pytestmark = pytest.mark.slow

CASES = {
    ("adasum", doors.COMPRESSION): "ValueError: op=Adasum reduces parameters, not gradients",
    ("adasum", doors.OWN): "ValueError: op=Adasum cannot be compressed",
    ("min", doors.COMPRESSION): "ValueError: the optimizer reduces gradients with op=Min, which cannot be compressed",
    ("max", doors.COMPRESSION): "ValueError: the optimizer reduces gradients with op=Max, which cannot be compressed",
    ("product", doors.COMPRESSION): "ValueError: the optimizer reduces gradients with op=Product, which cannot be compressed",
    ("min", doors.OWN): "ValueError: op=Min cannot be compressed",
    ("max", doors.OWN): "ValueError: op=Max cannot be compressed",
    ("product", doors.OWN): "ValueError: op=Product cannot be compressed",
    ("sparse", doors.COMPRESSION): "ValueError: sparse gradients",
    ("sparse", doors.OWN): "ValueError: sparse gradients",
    ("sparse as dense", doors.COMPRESSION): "ValueError: sparse gradients",
    ("sparse as dense", doors.OWN): "ValueError: sparse gradients",
    ("float64", doors.COMPRESSION): "TypeError: the gradient of 'float64/Compression.1.bias' is torch.float64",
    ("float64", doors.OWN): "TypeError: the gradient of 'float64/DistributedOptimizer.1.bias' is torch.float64",
    ("unnamed", doors.COMPRESSION): "ValueError: a gradient belongs to no known parameter: its shape is (",
    ("unnamed", doors.OWN): "ValueError: named_parameters was specified, but one or more model parameters were not named",
    ("thawed", doors.COMPRESSION): "ValueError: a gradient belongs to no known parameter: its shape is (",
    ("two of one name", doors.COMPRESSION): "ValueError: named_parameters has two parameters called 'same'",
    ("two of one name", doors.OWN): "ValueError: named_parameters has two parameters called 'same'",
    (
        "momentum twice",
        doors.COMPRESSION,
    ): "ValueError: the momentum 0.9 of topk:ratio=0.1,momentum=0.9 and the optimizer's own would act twice",
    (
        "momentum twice",
        doors.OWN,
    ): "ValueError: the momentum 0.9 of topk:ratio=0.1,momentum=0.9 and the optimizer's own would act twice",
    (
        "momentum unseen",
        doors.COMPRESSION,
    ): "ValueError: the momentum 0.9 of topk:ratio=0.1,momentum=0.9 and the optimizer's own would act twice",
    (
        "the class",
        doors.COMPRESSION,
    ): "TypeError: compression= is the class Compression; pass an object: compression=Compression(",
    (
        "another optimizer",
        doors.COMPRESSION,
    ): "ValueError: optimizer= has none of the model's parameters; pass the optimizer that",
    (
        "another optimizer",
        doors.OWN,
    ): "ValueError: the optimizer has none of named_parameters; pass those of the model that the",
    ("no optimizer", doors.COMPRESSION): "TypeError: the optimizer is a StepLR; pass a torch.optim.Optimizer",
    ("no optimizer", doors.OWN): "TypeError: the optimizer is a StepLR; pass a torch.optim.Optimizer",
    (
        "names forgotten",
        doors.COMPRESSION,
    ): "TypeError: named_parameters is the spec 'topk:ratio=0.1'; pass model.named_parameters()",
    ("names forgotten", doors.OWN): "TypeError: named_parameters is the spec 'topk:ratio=0.1'; pass model.named_parameters()",
    ("no process set", doors.COMPRESSION): "TypeError: process_set is a list; pass the result of hvd.add_process_set(...)",
    ("no process set", doors.OWN): "TypeError: process_set is a list; pass the result of hvd.add_process_set(...)",
    (
        "unfrozen later",
        doors.COMPRESSION,
    ): "RuntimeError: 'unfrozen later/Compression.0.weight' of shape (3, 4) was unfrozen or",
    (
        "unfrozen later",
        doors.OWN,
    ): "RuntimeError: 'unfrozen later/DistributedOptimizer.0.weight' of shape (3, 4) was unfrozen or",
    (
        "added later",
        doors.COMPRESSION,
    ): "RuntimeError: a parameter of shape (3, 2) was unfrozen or added after the ranks' exchange",
    ("added later", doors.OWN): "RuntimeError: a parameter of shape (3, 2) was unfrozen or added after the ranks' exchange",
}


MOMENTUM = "topk:ratio=0.1,momentum=0.9"


def linear(prefix: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def embedding(prefix: str) -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3))


def step(model: nn.Module, optimizer: Any) -> None:
    x = torch.tensor([hvd.rank(), 3]) if isinstance(model[0], nn.Embedding) else torch.ones(2, 4, dtype=model[0].weight.dtype)
    model(x).sum().backward()
    optimizer.step()


def options(make: Callable[[str], nn.Module] = linear, **stock_options: Any) -> Callable[[str, str], None]:
    def action(door: str, prefix: str) -> None:
        model = make(prefix)
        step(model, doors.sgd(door, model, "topk:ratio=0.1", prefix=prefix, **stock_options))

    return action


def unnamed(door: str, prefix: str) -> None:
    model = linear(prefix)
    named, optimizer = doors.named(model, prefix), torch.optim.SGD(model.parameters(), 0.1)
    if door == doors.OWN:
        gradcomp.horovod.DistributedOptimizer(optimizer, named[1:], "topk")
    else:
        compression = gradcomp.horovod.Compression("topk", named[1:])
        step(model, hvd.DistributedOptimizer(optimizer, named, compression=compression))


def thawed(door: str, prefix: str) -> None:
    model = linear(prefix)
    model[0].weight.requires_grad_(False)
    compression = gradcomp.horovod.Compression("topk", doors.named(model, prefix))
    model[0].weight.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, hvd.DistributedOptimizer(optimizer, doors.named(model, prefix), compression=compression))


def twice(door: str, prefix: str) -> None:
    model = linear(prefix)
    named = [("same", parameter) for parameter in model.parameters()]
    doors.wrapped(door, torch.optim.SGD(model.parameters(), 0.1), named, "topk")


def momentum(door: str, prefix: str) -> None:
    doors.sgd(door, linear(prefix), MOMENTUM, prefix=prefix, momentum=0.9)


def unseen_momentum(door: str, prefix: str) -> None:
    """Without optimizer= it is found at the first step."""
    model = linear(prefix)
    compression = gradcomp.horovod.Compression(MOMENTUM, doors.named(model, prefix))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step(model, hvd.DistributedOptimizer(optimizer, doors.named(model, prefix), compression=compression))


def the_class(door: str, prefix: str) -> None:
    model = linear(prefix)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, hvd.DistributedOptimizer(optimizer, doors.named(model, prefix), compression=gradcomp.horovod.Compression))


def another_optimizer(door: str, prefix: str) -> None:
    model, other = linear(prefix), linear(prefix)
    doors.wrapped(door, torch.optim.SGD(other.parameters(), 0.1), doors.named(model, prefix), "topk")


def no_optimizer(door: str, prefix: str) -> None:
    model = linear(prefix)
    schedule: Any = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.1), 1)
    doors.wrapped(door, schedule, doors.named(model, prefix), "topk")


def names_forgotten(door: str, prefix: str) -> None:
    spec: Any = "topk:ratio=0.1"
    if door == doors.OWN:
        gradcomp.horovod.DistributedOptimizer(torch.optim.SGD(linear(prefix).parameters(), 0.1), spec)
    else:
        gradcomp.horovod.Compression("topk", spec)


def unfrozen_later(door: str, prefix: str) -> None:
    """Without a word, each rank would train the layer by its own gradients alone."""
    model = linear(prefix)
    model[0].weight.requires_grad_(False)
    optimizer = doors.sgd(door, model, "topk:ratio=0.1", prefix=prefix)
    step(model, optimizer)
    model[0].weight.requires_grad_(True)
    step(model, optimizer)


def added_later(door: str, prefix: str) -> None:
    model = linear(prefix)
    optimizer = doors.sgd(door, model, "topk:ratio=0.1", prefix=prefix)
    step(model, optimizer)
    model.append(nn.Linear(2, 3))
    optimizer.add_param_group({"params": model[2].parameters()})
    step(model, optimizer)


ACTIONS = {
    "the class": the_class,
    "another optimizer": another_optimizer,
    "no optimizer": no_optimizer,
    "names forgotten": names_forgotten,
    "no process set": options(process_set=[0, 1]),
    "unfrozen later": unfrozen_later,
    "added later": added_later,
    "adasum": options(op=hvd.Adasum),
    "min": options(op=hvd.Min),
    "max": options(op=hvd.Max),
    "product": options(op=hvd.Product),
    "sparse": options(embedding),
    "sparse as dense": options(embedding, sparse_as_dense=True),
    "float64": options(lambda prefix: linear(prefix).double()),
    "unnamed": unnamed,
    "thawed": thawed,
    "two of one name": twice,
    "momentum twice": momentum,
    "momentum unseen": unseen_momentum,
}


def program() -> dict[str, Any]:
    """Ask for one impossible thing after the other on all ranks; return the texts of the refusals."""
    hvd.init()
    found = {}
    for case, action in ACTIONS.items():
        for door in doors.DOORS:
            with warnings.catch_warnings():
                if "sparse" in case:
                    warnings.simplefilter("ignore")  # torch's own, on making sparse tensors
                found[case, door] = small_net.refused(lambda a=action, r=door, c=case: a(r, f"{c}/{r}."))  # type: ignore[misc]
    model = small_net.net()  # after all that, training works
    last = small_net.train(model, doors.sgd(doors.OWN, model, "topk:ratio=0.01"), doors.batches(), 3)
    return {"found": found, "weights": last}


@ranks.once
def said() -> list[dict[str, Any]]:
    return ranks.launch(program, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_is_told_the_reason(case: tuple[str, str]) -> None:
    for rank in said():
        reason = rank["found"][case]
        assert reason.startswith(CASES[case]), reason


def test_after_refusals_another_optimizer_trains() -> None:
    first, second = (rank["weights"] for rank in said())
    assert first.isfinite().all()
    assert torch.equal(first, second)


def not_initialised() -> list[str]:
    """Forget hvd.init()."""
    model = linear("")
    return [small_net.refused(lambda d=door: doors.sgd(d, model, "topk")) for door in doors.DOORS]  # type: ignore[misc]


def test_a_forgotten_hvd_init_is_named() -> None:
    (both,) = ranks.launch(not_initialised, 1)
    assert both == ["ValueError: Horovod has not been initialized; use hvd.init()."] * 2


def frozen_afterwards(door: str) -> tuple[bool, Tensor]:
    """Do as the message about a layer that was unfrozen too late says."""
    hvd.init()
    model = linear("")
    optimizer = doors.sgd(door, model, "topk:ratio=0.5", prefix=f"frozen afterwards/{door}.")
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    for _ in range(3):
        step(model, optimizer)
    kept = torch.equal(model[0].weight, before)
    model[0].weight.requires_grad_(True)
    for _ in range(4):
        step(model, optimizer)
    return kept and not torch.equal(model[0].weight, before), small_net.weights(model)


@pytest.mark.parametrize("door", doors.DOORS)
def test_a_layer_that_is_frozen_afterwards_trains_once_it_is_unfrozen(door: str) -> None:
    (right, weights), (other_right, other_weights) = ranks.launch(frozen_afterwards, 2, door)
    assert right and other_right and torch.equal(weights, other_weights)
