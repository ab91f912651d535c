"""From updates to gradients: what waits is delivered, and all that the ranks' optimizers keep becomes equal."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.requests import Reduce
from gradcomp.engine.digests import digests
from gradcomp.engine.reducer import Reducer
from gradcomp.engine.slots import Slot, local
from gradcomp.engine.updates.hidden_momentum import class_of, kept_tensors
from gradcomp.engine.updates.optimizers import Optimizers
from gradcomp.engine.updates.steps import warn_user
from gradcomp.native.memory import Update
from gradcomp.networks import Connection, gather

_UNLIKE = (
    "the ranks' optimizers ({names}) still differ in what they keep after the change to a spec that exchanges gradients: their "
    "steps would move the ranks' weights apart. Make new optimizers on all ranks"
)


@torch.no_grad()
def deliver_residuals(reducer: Reducer, network: Connection, sums: bool) -> Iterator[None]:
    """Deliver the mean of all residuals, and average gradients that came before, in lock-step with other ranks.

    sums: updates and gradients are sums over the ranks, not means.
    """
    size = network.world.size
    scale = float(size) if sums else 1.0
    for bucket in reducer.buckets:
        bucket.put_back()  # a frozen layer's, which would be lost
    residuals = [(each.index, each.progress.residual / size) for each in reducer.buckets if each.progress is not None]
    answers = [network.start(Reduce(each), f"the mean residual of bucket {index}") for index, each in residuals]
    flat = [torch.cat([_gradient(reducer.slots[name]) for name in each.layout.names]) for each in reducer.buckets]
    grads = [network.start(Reduce(each * (scale / size)), f"the mean gradient of bucket {i}") for i, each in enumerate(flat)]
    yield
    for bucket, answer in zip(reducer.buckets, answers, strict=True):
        mean = answer()
        assert isinstance(mean, Tensor) and bucket.progress is not None
        bucket.progress.residual.zero_()
        bucket.progress.start.zero_()
        assert bucket.progress.weights is not None
        bucket.progress.weights.read()  # it may lie elsewhere since the last step, or have had none
        bucket.progress.keeps_rest = True
        bucket.progress.deliver(Update(mean), scale)
    for bucket, answer in zip(reducer.buckets, grads, strict=True):
        mean = answer()
        assert isinstance(mean, Tensor)
        for name, own in bucket.layout.views(mean).items():
            slot = reducer.slots[name]
            if slot.parameter is None or (grad := slot.parameter.grad) is None:
                continue
            if grad.is_sparse:  # after remove(), DDP exchanges such ones
                slot.parameter.grad = slot.shaped(own).to(grad.dtype).to_sparse(grad.sparse_dim())
            else:
                local(grad).copy_(slot.shaped(own))


@torch.no_grad()
def average_states(optimizers: Optimizers, network: Connection) -> Iterator[None]:
    """Average all numbers that the ranks' optimizers keep, in lock-step with other ranks. Warn if they still differ.

    The ranks can then exchange gradients: their optimizers go on alike.
    """
    optimizers.forget()
    if unlike := (yield from average_kept(optimizers, network)):
        warn_user(_UNLIKE.format(names=", ".join(sorted(unlike))))
    optimizers.note_averaged()


@torch.no_grad()
def average_kept(optimizers: Optimizers, network: Connection) -> Generator[None, None, set[str]]:
    """Average what the optimizers keep, in lock-step with other ranks. Return the names of classes that still differ."""
    if network.world.size == 1:
        return set()
    # Ranks may have let go of an old optimizer at different times.
    choices: Sequence[Sequence[torch.optim.Optimizer]] = [optimizers.alive(), optimizers.latest()]
    forms = gather(network, torch.tensor([*map(_form, choices)], device=network.device), "optimizers' forms")
    yield
    alike = [len({*numbers}) == 1 for numbers in zip(*(each.tolist() for each in forms()), strict=True)]
    differ = not any(alike)
    chosen = choices[-1] if differ else choices[alike.index(True)]
    if not differ:
        yield from _average_numbers(_numbers(chosen), network)
        kept = [each for optimizer in chosen for each in kept_tensors(optimizer)]
        if differ := (yield from _differ(kept, network)):  # the mean of equal ones may be rounded
            others = [each for each in kept if not each.is_floating_point()]
            if not (yield from _differ(others, network)):  # the codes of few bits have no mean, nor do their scales alone
                yield from _average_tensors([each for each in kept if each.is_floating_point()], network)
                differ = yield from _differ(kept, network)
    return {class_of(each).__name__ for each in chosen} if differ else set()


def _average_numbers(numbers: Sequence[tuple[dict[str, Any], str]], network: Connection) -> Iterator[None]:
    # One more than there are, since there may be none.
    own = torch.tensor([*(group[name] for group, name in numbers), 0.0], dtype=torch.float64, device=network.device)
    of_ranks = gather(network, own, "numbers of optimizers")
    yield
    for (group, name), *values in zip(numbers, *(each[:-1].tolist() for each in of_ranks()), strict=True):
        if len({*values}) > 1:  # the mean of equal ones may be rounded
            group[name] = fmean(values)


def _average_tensors(tensors: Sequence[Tensor], network: Connection) -> Iterator[None]:
    """Average one after the other: copies of all would take as much memory as the optimizer."""
    for i, state in enumerate(tensors):
        own = state.reshape(-1).to(network.device, torch.promote_types(state.dtype, torch.float32), copy=True)
        answer = network.start(Reduce(own), f"the mean of state {i}")
        yield
        mean = answer()
        assert isinstance(mean, Tensor)
        # Divided after the sum: a count of steps is then one.
        state.copy_(mean.div(network.world.size).view(state.shape))


def _differ(kept: Sequence[Tensor], network: Connection) -> Generator[None, None, bool]:
    own = digests({str(i): each for i, each in enumerate(kept)}).to(network.device)
    every = gather(network, own, "a comparison of optimizers' states")
    yield
    first, *others = every()
    return any(not torch.equal(each, first) for each in others)


def _numbers(optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[dict[str, Any], str]]:
    """List the numbers in the optimizers' groups, by group and name."""
    groups = [group for each in optimizers for group in each.param_groups]
    return [(group, name) for group in groups for name in sorted(group) if isinstance(group[name], float)]


def _form(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    kept = [(tuple(each.shape), each.dtype) for optimizer in optimizers for each in kept_tensors(optimizer)]
    return zlib.crc32(f"{kept} {[name for _, name in _numbers(optimizers)]}".encode())


def _gradient(slot: Slot) -> Tensor:
    """Copy a layer's gradient as it is now, flat; zeros where there is none."""
    grad = None if slot.parameter is None else slot.parameter.grad
    if grad is None:
        return torch.zeros(slot.layer.size, device=slot.layer.device)
    return slot.flat(grad.to_dense() if grad.is_sparse else grad).float().clone()
