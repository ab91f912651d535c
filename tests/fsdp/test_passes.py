"""FSDP2: backward passes of many kinds, with the sums of gradients beside a computation by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import RANKS, by_hand, inputs, loss, net, run_cases, whole_grads, wrap_of, wrapped
from ranks import join, launch, once
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import gradcomp
import gradcomp.fsdp

# By mesh: a spec, and the largest squared error of an exchange.
SPECS = {"shards": ("blocks:bits=8", 1e-4), "two by two": ("blocks:bits=8", 3e-4), "replicate": ("blocks:bits=8", 1e-4)}


def backward(model: nn.Module, step: int = 0) -> None:
    loss(model, inputs(step)[dist.get_rank()]).backward()


def clone_by_hand(step: int, model: nn.Module | None = None) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in by_hand(step, model).items()}


class Calls(nn.Module):
    """A net that calls its layer in the middle twice. checkpoints: recompute the layers in the backward pass."""

    def __init__(self, checkpoints: bool = False):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle, self.last = nn.Linear(50, 40), nn.Linear(40, 40), nn.Linear(40, 3)
        self.factor, self.shift = nn.Parameter(torch.ones(40)), nn.Parameter(torch.zeros(40))
        self.checkpoints = checkpoints

    def forward(self, batch: Tensor, calls_middle: bool = True, scales: bool = True) -> Tensor:
        batch = self.first(batch).tanh() + self.shift
        if scales:
            batch = batch * self.factor
        for layer in [*[self.middle] * 2 * calls_middle, self.last]:
            batch = (checkpoint(layer, batch, use_reentrant=False) if self.checkpoints else layer(batch)).tanh()
        return batch


def named_grads(model: nn.Module) -> dict[str, Tensor]:
    return {name.replace("_checkpoint_wrapped_module.", ""): each for name, each in whole_grads(model).items()}


def several_passes(kind: str, mesh: Any, spec: str) -> Any:
    """Accumulate over two passes that exchange, with is_last_backward of torch's."""
    model = wrapped(kind, net(), mesh)
    handle = gradcomp.fsdp.attach(model, spec)
    model.set_is_last_backward(False)
    backward(model, 0)
    model.set_is_last_backward(True)
    backward(model, 1)
    wanted = clone_by_hand(0)
    return whole_grads(model), {n: wanted[n] + each for n, each in by_hand(1).items()}, handle


def without_sync(kind: str, mesh: Any, spec: str) -> Any:
    """Accumulate three passes, of which the last one exchanges."""
    model = wrapped(kind, net(), mesh)
    handle = gradcomp.fsdp.attach(model, spec)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        backward(model, step)
    passes = [clone_by_hand(step) for step in range(3)]
    return whole_grads(model), {n: sum(each[n] for each in passes) for n in passes[0]}, handle


def without_all_reduce(kind: str, mesh: Any, spec: str) -> Any:
    """Accumulate over shards alone, with an all-reduce of the user's between two passes."""
    model = wrapped(kind, net(), mesh)
    handle = gradcomp.fsdp.attach(model, spec)
    for step in range(3):
        if kind != "shards":
            model.set_requires_all_reduce(step == 2)
        backward(model, step)
        if kind != "shards":
            group = mesh.get_group("replicate")
            own = torch.full((2400,), float(dist.get_rank()))
            dist.all_reduce(own, group=group)
            assert own[0] == sum(dist.get_process_group_ranks(group)), own[0]
    passes = [clone_by_hand(step) for step in range(3)]
    return whole_grads(model), {n: sum(each[n] for each in passes) for n in passes[0]}, handle


def frozen_in_training(kind: str, mesh: Any, spec: str) -> Any:
    """Freeze a bias after a step, and train it again after another."""
    model = wrapped(kind, net(), mesh)
    handle = gradcomp.fsdp.attach(model, spec)
    by_itself = net()
    founds: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for step, frozen in enumerate((False, True, False)):
        model.zero_grad()
        for each in (model, by_itself):
            each[2].bias.requires_grad_(not frozen)
        backward(model, step)
        founds |= {f"{step} {n}": each for n, each in whole_grads(model).items()}
        wanted |= {f"{step} {n}": each.clone() for n, each in by_hand(step, by_itself).items()}
        by_itself.zero_grad()
    return founds, wanted, handle


def unfrozen_in_training(kind: str, mesh: Any, spec: str) -> Any:
    model = net()
    model[0].requires_grad_(False)
    handle = gradcomp.fsdp.attach(wrapped(kind, model, mesh), spec)
    model[0].requires_grad_(True)
    backward(model)
    return whole_grads(model), by_hand(0), handle


def frozen_from_start(kind: str, mesh: Any, spec: str) -> Any:
    model, by_itself = net(), net()
    for each in (model, by_itself):
        each[0].requires_grad_(False)
        each[2].weight.requires_grad_(False)
    wrapped(kind, model, mesh)
    handle = gradcomp.fsdp.attach(model, spec)
    backward(model)
    return whole_grads(model), by_hand(0, by_itself), handle


def of_calls(kind: str, mesh: Any, spec: str, model: Calls, **call: bool) -> Any:
    """Exchange the gradients of a net that calls its layers once, twice or not at all."""
    for layer in (model.first, model.middle, model.last):
        wrap_of(kind)(layer, mesh=mesh)
    wrap_of(kind)(model, mesh=mesh)
    if call.pop("sends_zeros", False):
        model.set_reduce_scatter_unused_params(True)
    handle = gradcomp.fsdp.attach(model, spec)
    model(inputs(0)[dist.get_rank()], **call).square().mean().backward()
    by_itself = Calls()
    (sum(by_itself(batch, **call).square().mean() for batch in inputs(0)) / RANKS).backward()
    grads = {n: each for n, each in named_grads(model).items() if each.count_nonzero()}
    return grads, {n: each.grad for n, each in by_itself.named_parameters() if each.grad is not None}, handle


def called_twice(kind: str, mesh: Any, spec: str) -> Any:
    return of_calls(kind, mesh, spec, Calls())


def parameter_unused(kind: str, mesh: Any, spec: str) -> Any:
    return of_calls(kind, mesh, spec, Calls(), scales=False)


def parameter_unused_as_zeros(kind: str, mesh: Any, spec: str) -> Any:
    return of_calls(kind, mesh, spec, Calls(), scales=False, sends_zeros=True)


def module_unused(kind: str, mesh: Any, spec: str) -> Any:
    return of_calls(kind, mesh, spec, Calls(), calls_middle=False)


def checkpointed(kind: str, mesh: Any, spec: str) -> Any:
    """Recompute modules of FSDP2 in the backward pass."""
    return of_calls(kind, mesh, spec, Calls(checkpoints=True))


def _recomputed(kind: str, mesh: Any, spec: str, how: CheckpointImpl) -> Any:
    model = Calls()
    model.middle, model.last = (checkpoint_wrapper(each, checkpoint_impl=how) for each in (model.middle, model.last))
    return of_calls(kind, mesh, spec, model)


def checkpoint_inside(kind: str, mesh: Any, spec: str) -> Any:
    return _recomputed(kind, mesh, spec, CheckpointImpl.NO_REENTRANT)


def reentrant_checkpoint_inside(kind: str, mesh: Any, spec: str) -> Any:
    return _recomputed(kind, mesh, spec, CheckpointImpl.REENTRANT)


class Recomputed(nn.Sequential):
    """A net that recomputes its layers in backward passes within the pass."""

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self:
            batch = checkpoint(layer, batch, use_reentrant=True)
        return batch


def _of_layers(kind: str, mesh: Any, spec: str, model: nn.Sequential, has_root: bool) -> Any:
    for layer in [*model[::2], *([model] if has_root else [])]:
        wrap_of(kind)(layer, mesh=mesh)
    handle = gradcomp.fsdp.attach(model, spec)
    model(inputs(0)[dist.get_rank()].requires_grad_(isinstance(model, Recomputed))).square().mean().backward()
    return whole_grads(model), by_hand(0), handle


def passes_within(kind: str, mesh: Any, spec: str) -> Any:
    return _of_layers(kind, mesh, spec, Recomputed(*net()), True)


def without_root(kind: str, mesh: Any, spec: str) -> Any:
    return _of_layers(kind, mesh, spec, net(), False)


def passes_within_and_no_root(kind: str, mesh: Any, spec: str) -> Any:
    return _of_layers(kind, mesh, spec, Recomputed(*net()), False)


CASES: list[Callable[..., Any]] = [
    several_passes,
    without_sync,
    without_all_reduce,
    frozen_in_training,
    unfrozen_in_training,
    frozen_from_start,
    called_twice,
    parameter_unused,
    parameter_unused_as_zeros,
    module_unused,
    checkpointed,
    checkpoint_inside,
    reentrant_checkpoint_inside,
    passes_within,
    without_root,
    passes_within_and_no_root,
]
# The steps, or passes that exchanged; else 1.
STEPS = {"several_passes": 2, "frozen_in_training": 3}


def passed(kind: str) -> dict[str, Any]:
    join()
    return run_cases(CASES, kind, SPECS[kind][0])


@once
def of_mesh(kind: str) -> list[dict[str, Any]]:
    return launch(passed, RANKS, kind)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
@pytest.mark.parametrize("kind", SPECS)
def test_gradients_of_a_pass(kind: str, case: str) -> None:
    """They are the sums by hand."""
    for rank in of_mesh(kind):
        wrong, stats = rank[case]
        assert wrong < SPECS[kind][1]
        assert stats["steps"] == STEPS.get(case, 3 if case == "without_all_reduce" else 1)
