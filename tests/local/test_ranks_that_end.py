"""A rank of local steps that dies: the others end with an error at once, and go on from their states without it."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import end_together, join, launch, report, start_anew
from torch import Tensor, nn

import gradcomp

EVERY = 4


def made(spec: str, fragments: int) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(40, 5)
    local = gradcomp.local.LocalSteps(
        model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), spec, every=EVERY, fragments=fragments
    )
    return model, local


def train(model: nn.Module, local: Any, steps: int) -> None:
    for step in range(steps):
        local.zero_grad()
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        (model(x) - dist.get_rank()).square().mean().backward()
        local.step()


def with_a_death(spec: str, fragments: int, folder: str) -> None:
    """Save in the middle of a round; then rank 2 dies, and the others wait for it in the synchronization."""
    join()
    model, local = made(spec, fragments)
    train(model, local, EVERY + 1)
    torch.save(local.state_dict(), Path(folder) / f"{dist.get_rank()}.pt")
    if dist.get_rank() == 2:
        os._exit(1)
    began = time.monotonic()
    try:
        train(model, local, 2 * EVERY)
        said = ""
    except RuntimeError as error:
        said = str(error)
    if fragments == 1:  # nothing was under way
        torch.save(local.state_dict(), Path(folder) / f"{dist.get_rank()}-late.pt")
    report((said, time.monotonic() - began))
    end_together(5)


def residual_of(local: Any) -> Tensor:
    return torch.cat(
        [each.flatten() for fragment in local._fragments for _, each in sorted(fragment.session.resume.residual().items())]
    )


def without_it(spec: str, fragments: int, files: list[str]) -> tuple[bool, Tensor, list[Tensor]]:
    """Go on from the states of some ranks."""
    join()
    rank, (model, local) = dist.get_rank(), made(spec, fragments)
    states = [torch.load(each) for each in files]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        local.load_state_dict(states)
    assert [str(each.message)[:34] for each in caught] == [f"the states of {3 - len(states)} of 3 ranks are mis"]
    is_own = True
    for part in states[rank % len(states)]["fragments"]:
        for name, each in part["weights" if rank < len(states) else "starts"].items():
            if rank < len(states) and dist.get_world_size() != 3:  # what it has not sent is shared by all ranks now
                (share,) = part["exchange"]["of_rank"].values()
                each = each + share["layers"]["feedback"]["residual"][name].view(each.shape)
            is_own &= torch.equal(dict(model.named_parameters())[name], each)
    residual = residual_of(local)
    local.flush()
    flushed = model.weight.detach().clone()
    train(model, local, 2 * EVERY + 1)
    local.flush()
    return is_own, residual, [flushed, model.weight.detach().clone()]


def saved_residual(file: str) -> Tensor:
    """Read the residual of a state, of all fragments."""
    shares = [share for part in torch.load(file)["fragments"] for share in part["exchange"]["of_rank"].values()]
    return torch.cat(
        [each.flatten() for share in shares for _, each in sorted(share["layers"]["feedback"]["residual"].items())]
    )


@pytest.mark.parametrize("spec,fragments", [("topk:ratio=0.1", 1), ("topk:ratio=0.1,route=split", 2)])
def test_a_rank_that_dies_takes_its_own_part_along(spec: str, fragments: int, tmp_path: Path) -> None:
    """A residual of one rank of three goes on with its weight in the mean, on two ranks, on one and on three."""
    for said, seconds in launch(with_a_death, 3, spec, fragments, str(tmp_path), dies={2: 1}, seconds=100):
        assert seconds < 30 and "a rank ended or raised an error" in said
    cases = [("", 2, 2)] if fragments > 1 else [("", 2, 2), ("", 1, 1), ("", 2, 3), ("-late", 2, 2)]
    for end, left, ranks in cases:
        files = [str(tmp_path / f"{rank}{end}.pt") for rank in range(2 - left, 2)]
        found = launch(without_it, ranks, spec, fragments, files)
        assert all(own for own, _, _ in found)
        for _, _, weights in found[1:]:
            assert all(map(torch.equal, weights, found[0][2]))
        mean = torch.stack([residual for _, residual, _ in found]).mean(0)
        torch.testing.assert_close(mean, torch.stack([saved_residual(file) for file in files]).sum(0) / 3)


def around_a_reset() -> list[Tensor]:
    """Train, and train on with LocalSteps made anew after what an elastic reset does."""
    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = nn.Linear(40, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found = []
    for reset in range(2):
        if reset:
            start_anew()
        local = gradcomp.local.LocalSteps(model, optimizer, "topk:ratio=0.1", every=EVERY)
        for step in range(EVERY + 1):
            local.zero_grad()
            (model(torch.ones(8, 40) * step) - hvd.rank()).square().mean().backward()
            local.step()
        local.flush()
        found.append(model.weight.detach().clone())
    return found


def test_local_steps_are_made_anew_after_a_reset_of_horovod() -> None:
    pytest.importorskip("horovod.torch", reason="a reset of Horovod was NOT tested: Horovod is not installed")
    first, second = launch(around_a_reset, 2, anew=1)
    assert all(map(torch.equal, first, second)) and not torch.equal(*first)
