"""auto in trainings that do more than backward and step: loss=low takes part in all, loss=high says at once what it cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import choices
import pytest
import ranks
import small_net
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.slow

STEPS, SOON = 40, 8
LEVELS = "orq:levels=5,momentum=0"

Step = Callable[[DistributedDataParallel, torch.optim.Optimizer, Any], None]


def clip(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, data: Any) -> None:
    optimizer.zero_grad()
    small_net.backward(model, next(data))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def accumulate(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, data: Any) -> None:
    optimizer.zero_grad()
    for _ in range(2):
        small_net.backward(model, next(data))
    optimizer.step()


def close(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, data: Any) -> None:
    batch = next(data)

    def closure() -> float:
        optimizer.zero_grad()
        small_net.backward(model, batch)
        return 0.0

    optimizer.step(closure)


HABITS = (clip, accumulate, close)
# What the error of a step without an exchange names.
REMEDIES = ("topk:momentum=0", "auto:loss=low")


def trained(spec: str | None, habit: Step, steps: int) -> Tensor:
    model = small_net.net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    whole = DistributedDataParallel(model)
    if spec is not None:
        gradcomp.ddp.attach(whole, spec, optimizer=optimizer)
    data = small_net.examples(dist.get_rank())
    for _ in range(steps):
        habit(whole, optimizer, data)
    return small_net.weights(model)


def last_of_three() -> dict[Any, Any]:
    """The gradients of one more step by the chosen way of stock, and by DDP's own."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    ranks.join()
    found = {}
    for way, form in (("stock", torch.float32), ("stock in bf16", torch.float32), ("stock", torch.bfloat16)):
        for view in (False, True):
            model = small_net.net().to(form)
            whole = DistributedDataParallel(model, gradient_as_bucket_view=view)
            with choices.chosen(way):
                handle = gradcomp.ddp.attach(whole, "auto")
                data = ((x.to(form), y) for x, y in small_net.examples(dist.get_rank()))
                optimizer = torch.optim.SGD(model.parameters(), 0.02)
                small_net.train(whole, optimizer, data, STEPS)
                stats = handle.stats()
                assert stats["auto"]["way"] == way
                assert stats["bytes_sent"] == sum(
                    p.numel() * (4 if way == "stock" and form == torch.float32 else 2) for p in model.parameters()
                )
            assert ("stock in bf16" in map(str, handle._chooser._candidates())) == (form == torch.float32)
            same = copy.deepcopy(model)
            alone = DistributedDataParallel(same, gradient_as_bucket_view=view)
            if way != "stock":
                alone.register_comm_hook(
                    None, lambda state, bucket: bf16_compress_hook(state, bucket)
                )  # torch refuses it on CPUs
            batch = next(data)
            for each in 2 * (whole, alone):  # DDP arranges its buckets anew after the first pass, and sums depend on it
                each.zero_grad(set_to_none=False)
                small_net.backward(each, batch)
            found[way, form, view] = [torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (model, same)]
    return found


def alone_after(change: str) -> tuple[str, bool]:
    """Change from topk, whose exchange has the momentum, and then step without an exchange."""
    model = small_net.net()
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    whole, data = DistributedDataParallel(model), small_net.examples(dist.get_rank())
    with choices.chosen("stock"):
        handle = gradcomp.ddp.attach(whole, "topk", optimizer=optimizer)
        small_net.train(whole, optimizer, data, 3)
        handle.change(change)
        small_net.train(whole, optimizer, data, 5)
        said = small_net.refused(lambda: small_net.train(model, optimizer, data, 1))
    return said, all(state["momentum_buffer"].any() for state in optimizer.state.values())


def program() -> dict[Any, Any]:
    ranks.join()
    found: dict[Any, Any] = {}
    for change in REMEDIES:
        found[change] = alone_after(change)
    for habit in HABITS:
        with choices.chosen(LEVELS):
            found[habit.__name__, "low"] = trained("auto", habit, STEPS)
        with choices.chosen("stock"):
            found[habit.__name__, "stock"] = trained("auto", habit, STEPS), trained(None, habit, STEPS)
        found[habit.__name__, "high"] = small_net.refused(lambda habit=habit: trained("auto:loss=high", habit, SOON))
    return found


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch(program, 2)


@pytest.mark.parametrize("habit", [habit.__name__ for habit in HABITS])
def test_loss_low_leaves_the_momentum_to_the_optimizer(habit: str) -> None:
    first, second = (own[habit, "low"] for own in found())
    assert torch.equal(first, second) and first.isfinite().all()
    for own in found():
        ours, alone = own[habit, "stock"]
        torch.testing.assert_close(ours, alone, atol=1e-6, rtol=1e-5)  # the exact steps before the choice add up otherwise


@pytest.mark.parametrize("habit", [habit.__name__ for habit in HABITS])
def test_loss_high_refuses_in_the_first_steps(habit: str) -> None:
    """Error feedback needs the momentum. Its candidates come first: a training that they do not suit hears of it at once."""
    for own in found():
        assert "loss=low" in own[habit, "high"] and "momentum" in own[habit, "high"]


@pytest.mark.parametrize("change", REMEDIES)
def test_after_a_change_that_leaves_the_momentum_a_training_may_step_alone(change: str) -> None:
    for own in found():
        assert own[change] == ("nothing was raised", True)


def test_on_three_ranks_the_ways_of_stock_are_ddps_own_to_the_last_bit() -> None:
    for own in ranks.launch(last_of_three, 3):
        assert all(torch.equal(ours, alone) for ours, alone in own.values())
