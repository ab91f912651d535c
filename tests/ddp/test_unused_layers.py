"""Layers without a gradient under DDP: unused, or frozen. An overflow elsewhere is seen, and nothing of them is lost."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.slow

SHAPES = {"first": (20, 10), "middle": (30, 20), "last": (10, 30)}
STEPS, OVERFLOW, BAD = 6, 3, 7
# The ranks on which a layer has a gradient in a step.
USES: dict[str, Any] = {
    "never": lambda step: (),
    "frozen": lambda step: (0, 1) if step == 0 else (),
    "once": lambda step: (0, 1) if step == 0 else (),
    "one rank": lambda step: (0,),
    "late": lambda step: (0, 1) if step == STEPS - 1 else (),
}
SPECS = (
    *("topk:ratio=0.05", "topk:ratio=0.05,route=split", "topk:ratio=0.05,route=tree", "gtopk:ratio=0.05", "sdagc"),
    *("gs_sgd:ratio=0.05", "sketched_sgd:ratio=0.05", "lgc:dense=2,learn=3,ratio=0.05", "dense", "dense:feedback=true", "half"),
    *("blocks", "sign", "sign:route=alltoall,group=32", "bingrad", "linear", "orq", "orq:levels=9,feedback=true", "qsgd"),
)
# Specs that round zeros to something, and keep the error.
ROUNDING = ("sign", "orq:levels=9,feedback=true")
CASES = [
    (spec, use, ("first", "last")[(i + j) // 2 % 2])
    for i, spec in enumerate(SPECS)
    for j, use in enumerate(USES)
    if spec in ROUNDING or (i + j) % 2 == 0
]
RETURNS = [(way, nesterov, decay) for way in ("frozen", "unused") for nesterov in (False, True) for decay in (0.0, 1e-4)]


class Model(nn.Module):
    """Parameters that begin at 0, and a loss that has the known gradients."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.get_parameter(name) * grad).sum() for name, grad in grads.items()]).sum()


def gradient(step: int, rank: int, name: str) -> Tensor:
    seed = 100 * step + 10 * rank + list(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def train(spec: str, use: str, layer: str) -> dict[str, Any]:
    """Train with SGD at a rate of 1, under a scaler. Rank 1's gradient of the middle layer overflows once.

    Return the scale before and after that step, the length of its move, and the error of the law of conservation.
    """
    model, rank = Model(), dist.get_rank()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    whole = DistributedDataParallel(model, find_unused_parameters=True)
    handle = gradcomp.ddp.attach(whole, spec, optimizer=optimizer, scaler=scaler)
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    scales: list[float] = []
    moved = 0.0
    for step in range(STEPS):
        if use == "frozen" and step == 1:
            model.get_parameter(layer).requires_grad_(False)
        used = [name for name in SHAPES if name != layer or rank in USES[use](step)]
        grads = {name: gradient(step, rank, name) for name in used}
        on_updates = handle._session.reducer.on_updates
        for name, grad in grads.items():  # a skipped step has no update; gradients go back to their residual
            sums[name] += 0 if on_updates and step == OVERFLOW else grad
        if step == OVERFLOW and rank == 1:
            sums["middle"].view(-1)[BAD] -= 0 if on_updates else grads["middle"].view(-1)[BAD]
            grads["middle"].view(-1)[BAD] = torch.inf
        before = torch.cat([each.detach().flatten() for each in model.parameters()])
        scales.append(scaler.get_scale())
        scaler.scale(whole(grads)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == OVERFLOW:
            moved = float((torch.cat([each.detach().flatten() for each in model.parameters()]) - before).abs().sum())
    off = 0.0
    for name, left in handle.residual().items():
        both = torch.stack([sums[name], left.double()]).flatten(1)
        dist.all_reduce(both)
        off = max(off, float(((both[0] - both[1]) / 2 + model.get_parameter(name).detach().double().view(-1)).abs().max()))
    keeps = any(each.feedback is not None and each.feedback.feedback for each in handle._session.reducer.buckets)
    return {"scales": (*scales, scaler.get_scale()), "moved": moved, "off": off if keeps else 0.0}


def returns(way: str, nesterov: bool, decay: float) -> float:
    """Train with SGD and everything sent. Pause a layer in steps 20 to 24. Return the largest difference to torch's weights.

    A layer that no rank used is moved by its momentum alone.
    """
    model, plain = Model(), Model()
    whole = DistributedDataParallel(model, find_unused_parameters=True)
    ours, theirs = (
        torch.optim.SGD(each.parameters(), 0.01, momentum=0.9, nesterov=nesterov, weight_decay=decay) for each in (model, plain)
    )
    gradcomp.ddp.attach(whole, "topk:ratio=1,wire=exact", optimizer=ours)
    off = 0.0
    for step in range(30):
        pauses = 20 <= step < 25
        model.middle.requires_grad_(way == "unused" or not pauses)
        used = [name for name in SHAPES if name != "middle" or not pauses]
        whole({name: gradient(step, dist.get_rank(), name) for name in used}).backward()
        for name, weight in plain.named_parameters():
            mean = (gradient(step, 0, name) + gradient(step, 1, name)) / 2
            weight.grad = mean if name in used else -decay * weight.detach() if way == "unused" else None
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        off = max(
            off, *(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        )
    return off


def all_cases() -> dict[Any, Any]:
    ranks.join()
    return {case: train(*case) for case in CASES} | {case: returns(*case) for case in RETURNS}


outcomes = ranks.once(lambda: ranks.launch(all_cases, 2))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_rank_sees_an_overflow_and_nothing_is_lost(case: tuple[str, str, str]) -> None:
    for own in outcomes():
        found = own[case]
        assert found["scales"] == (*[4.0] * (OVERFLOW + 1), *[2.0] * (STEPS - OVERFLOW)), "stock halves its scale once"
        assert found["moved"] == 0.0
        assert found["off"] < 1e-4


@pytest.mark.parametrize("case", RETURNS, ids=str)
def test_a_layer_that_comes_back_trains_on_as_in_torch(case: tuple[str, bool, float]) -> None:
    for own in outcomes():
        assert own[case] < 1e-6
