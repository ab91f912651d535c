"""Random training programs under DDP on two ranks: whatever they do, replicas are equal to the bit after every step."""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop

import gradcomp

pytestmark = pytest.mark.slow

# Steps of a program.
STEPS = 20
# A scaler decides for each optimizer by itself.
SCALES_SEVERAL = False
SPECS = (
    "topk:ratio=0.1",
    "topk:ratio=0.02,route=split",
    "topk:ratio=0.1,momentum=0",
    "topk:ratio=0.1,momentum=0.5,clip=1",
    "topk:ratio=0.2; 0.*=sign",
    "sign",
    "sdagc:density=0.1",
    "gtopk:ratio=0.1",
    "orq",
    "orq:levels=9,feedback=true",
    "blocks",
    "dense",
    "half",
)
OPTIMIZERS: tuple[Any, ...] = (
    lambda ps: SGD(ps, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda ps: SGD(ps, 0.05),
    lambda ps: AdamW(ps, 0.01),
    lambda ps: RMSprop(ps, 0.005, momentum=0.5),
    lambda ps: Adagrad(ps, 0.02),
)


class Program:
    """One program. Its draws are the same on all ranks, but for the examples and the rank whose gradient overflows."""

    def __init__(self, seed: int):
        self.draws = random.Random(seed)
        torch.manual_seed(seed)
        self.examples = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(12, 12), nn.Tanh())))
        self.whole = DistributedDataParallel(
            self.layers, find_unused_parameters=True, gradient_as_bucket_view=self.draws.random() < 0.5, bucket_cap_mb=0.001
        )
        self.spec = self.draws.choice(SPECS)
        self.handle = gradcomp.ddp.attach(self.whole, self.spec, seed=seed)
        self.late: list[nn.Parameter] = []
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4) if self.draws.random() < 0.4 else None
        self.optimizers = self.make_optimizers()
        self.told: list[str] = [self.spec]

    def make_optimizers(self) -> list[Optimizer]:
        """Make one or two. Some leave a layer out, which comes later."""
        parameters = [*self.layers.parameters()]
        if self.draws.random() < 0.3:
            self.late, parameters = parameters[-2:], parameters[:-2]
        if self.draws.random() < 0.35 and (self.scaler is None or SCALES_SEVERAL):
            return [self.draws.choice(OPTIMIZERS)(parameters[:2]), self.draws.choice(OPTIMIZERS)(parameters[2:])]
        return [self.draws.choice(OPTIMIZERS)(parameters)]

    def loss(self) -> Tensor:
        x, y = (torch.randn(4, 12, generator=self.examples) for _ in range(2))
        return (self.whole(x) - y).square().mean()

    def between(self) -> None:
        """Change something between two steps, or nothing."""
        act = self.draws.choice(("nothing", "nothing", "rate", "change", "freeze", "unfreeze", "group", "optimizer"))
        self.told.append(act)
        if act == "rate":
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.8
        elif act == "change":
            self.told.append(spec := self.draws.choice(SPECS))
            self.handle.change(spec)
        elif act in ("freeze", "unfreeze"):
            self.layers[2].requires_grad_(act == "unfreeze")
        elif act == "group" and self.late:
            self.optimizers[-1].add_param_group({"params": self.late, "lr": 0.01})
            self.late = []
        elif act == "optimizer" and self.draws.random() < 0.3:
            self.late = []
            self.optimizers = self.make_optimizers()

    def clip(self) -> None:
        act = self.draws.choice(("", "norm", "value"))
        self.told.append(act)
        if act == "norm":
            nn.utils.clip_grad_norm_(self.layers.parameters(), 0.3)
        elif act == "value":
            nn.utils.clip_grad_value_(self.layers.parameters(), 0.01)

    def step(self) -> None:
        """Run backward passes, and step with every optimizer, or with one, or with none."""
        passes = self.draws.choice((1, 1, 2))
        syncs, ends, closes = self.draws.random() < 0.5, self.draws.random(), self.draws.random() < 0.15
        overflows = self.scaler is not None and self.draws.random() < 0.2
        stepping = self.optimizers if self.draws.random() < 0.8 else self.optimizers[:1]
        self.told.append(f"{passes} {syncs} {ends:.1f} {closes} {overflows} {len(stepping)}")
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=ends < 0.5)
        if closes and self.scaler is None:
            for optimizer in stepping:
                optimizer.step(lambda: self.closure())
            return
        for i in range(passes):
            with contextlib.nullcontext() if syncs or i == passes - 1 else self.whole.no_sync():
                loss = self.loss() / passes
                if overflows and dist.get_rank() == 1 and i == passes - 1:
                    loss = loss * math.inf
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if ends < 0.1:  # a step that is left out
            return
        if self.scaler is None:
            self.clip()
            for optimizer in stepping:
                optimizer.step()
            return
        for optimizer in stepping:
            self.scaler.unscale_(optimizer)
        self.clip()
        for optimizer in stepping:
            self.scaler.step(optimizer)
        self.scaler.update()

    def closure(self) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.layers.parameters(), 0.3)
        return loss

    def check(self, step: int) -> None:
        """Hold that all weights are finite, and the other rank's."""
        own = torch.cat([each.detach().flatten() for each in self.layers.parameters()])
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        assert all(torch.equal(own, each) for each in every) and own.isfinite().all(), (step, self.told)
        if self.scaler is not None:
            scales: list[Any] = [None, None]
            dist.all_gather_object(scales, self.scaler.get_scale())
            assert scales[0] == scales[1], (step, self.told)


def program(first: int, count: int) -> int:
    """Run so many programs. Return the number of steps."""
    ranks.join()
    for seed in range(first, first + count):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*find_unused_parameters")  # torch's own, of programs that use all
            warnings.filterwarnings("ignore", ".*no layer that is trained has a name like")
            running = Program(seed)
            for step in range(STEPS):
                try:
                    running.between()
                    running.step()
                except Exception as error:
                    raise AssertionError(f"seed {seed}, step {step}: {running.told}") from error
                running.check(step)
    return count * STEPS


@pytest.mark.parametrize("first, count", [(0, 15), pytest.param(1000, 500, marks=pytest.mark.long)])
def test_replicas_are_equal_after_every_step_of_any_program(first: int, count: int) -> None:
    assert ranks.launch(program, 2, first, count, seconds=900 if count > 100 else 200) == [count * STEPS] * 2
