"""The change from updates to gradients: what waits is delivered, and all that the ranks' optimizers keep becomes equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradcomp.core.requests import Reduce
from gradcomp.engine.reducer import Reducer
from gradcomp.engine.slots import Slot, local
from gradcomp.engine.updates.hidden_momentum import floating_state
from gradcomp.native.memory import Update
from gradcomp.networks import Connection


@torch.no_grad()
def deliver_residuals(
    reducer: Reducer, optimizers: Sequence[torch.optim.Optimizer], network: Connection, sums: bool
) -> Iterator[None]:
    """Deliver the mean of all residuals, and average gradients and the optimizers' states, in lock-step with other ranks.

    The ranks can then exchange gradients: their optimizers go on alike, also with gradients that came before. sums: updates and
    gradients are sums over the ranks, not means.
    """
    size = network.world.size
    scale = float(size) if sums else 1.0
    for bucket in reducer.buckets:
        bucket.put_back()  # a frozen layer's, which would be lost
    residuals = [(each.index, each.progress.residual / size) for each in reducer.buckets if each.progress is not None]
    answers = [network.start(Reduce(each), f"the mean residual of bucket {index}") for index, each in residuals]
    flat = [torch.cat([_gradient(reducer.slots[name]) for name in each.layout.names]) for each in reducer.buckets]
    grads = [network.start(Reduce(each * (scale / size)), f"the mean gradient of bucket {i}") for i, each in enumerate(flat)]
    states = [each for optimizer in optimizers for each in floating_state(optimizer)]
    means = [network.start(Reduce(each.float().reshape(-1) / size), f"the mean of state {i}") for i, each in enumerate(states)]
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
            grad = None if slot.parameter is None else slot.parameter.grad
            if grad is not None and not grad.is_sparse:
                local(grad).copy_(slot.shaped(own))
    for state, answer in zip(states, means, strict=True):
        mean = answer()
        assert isinstance(mean, Tensor)
        state.copy_(mean.view(state.shape))


def _gradient(slot: Slot) -> Tensor:
    """Copy a layer's gradient as it is now, flat; zeros where there is none."""
    grad = None if slot.parameter is None else slot.parameter.grad
    if grad is None or grad.is_sparse:
        return torch.zeros(slot.layer.size, device=slot.layer.device)
    return slot.flat(grad).float().clone()
