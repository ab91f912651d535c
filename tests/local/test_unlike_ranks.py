"""Ranks whose steps or calls of flush() differ: an error on all of them, or no harm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import end_together, join, launch, report
from torch import nn

import gradcomp


def raises(act: Callable[[], object]) -> bool:
    try:
        act()
    except RuntimeError:
        return True
    return False


def train(local: gradcomp.local.LocalSteps, model: nn.Module, rank: int, steps: int) -> None:
    for step in range(steps):
        local.zero_grad()
        (model(torch.ones(4, 40)) * (rank + step + 1)).sum().backward()
        local.step()


def on_ranks(door: str, spec: str, fragments: int) -> None:
    """Flush after unlike numbers of steps of a round; then let rank 1 flush where rank 0 synchronizes."""
    if door == "horovod":
        import horovod.torch as hvd

        hvd.init()
        rank = int(hvd.rank())
    else:
        join()
        rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 4))
    local = gradcomp.local.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=1e-4), spec, every=6, fragments=fragments)
    train(local, model, rank, 12 + 2 * rank)
    local.flush()
    weights, said = model[0].weight.detach().flatten()[:5].tolist(), ""
    train(local, model, rank, 5)
    try:
        if rank:
            local.flush()
        else:
            train(local, model, rank, 6)
    except RuntimeError as error:
        said = str(error)
    if said:  # a checkpoint after the error does not wait for messages that never come
        with pytest.raises(RuntimeError, match="calls flush"):
            local.flush()
        assert fragments == 1 or raises(local.state_dict)
    report((weights, said, local.stats()["steps"]))
    if fragments > 1:
        end_together()  # the fragment that rank 0 sent is under way for good


@pytest.mark.parametrize(
    "door,spec,fragments",
    [("torch", "dense", 1), ("torch", "topk", 2), ("torch", "blocks:route=alltoall", 2), ("horovod", "topk:route=split", 2)],
)
def test_unlike_ranks_are_told_or_harmless(door: str, spec: str, fragments: int) -> None:
    (first, said, steps), (second, other, _) = launch(on_ranks, 2, door, spec, fragments, seconds=60)
    assert first == second
    assert said == other and "rank 0 synchronizes after step 6 of 6, and rank 1 calls flush() after step 5 of 6" in said
    assert steps <= 12 + 5 + 6
