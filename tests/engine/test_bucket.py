"""A bucket and its stages: a stage's part of the state is saved, loaded and carried over by the stage alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import gradcomp
from gradcomp import saved
from gradcomp.core.compressor import Layout
from gradcomp.engine.context import StepContext
from gradcomp.engine.stages.feedback import Feedback
from gradcomp.engine.stages.stage import Accumulation, Copy, Part, Shares, Stage, load_sum

SHAPES = {"a": (30,), "b": (4, 5)}


@dataclass
class Seen:
    """The sum of all gradients, and the steps."""

    total: Tensor
    steps: int = 0


class Watch(Stage):
    """A stage that the package does not have: it sums gradients up, by layer, and counts steps, by bucket."""

    name: ClassVar[str] = "watch"
    fields: ClassVar[tuple[str, ...]] = ("total",)

    def init(self, layout: Layout, seed: int) -> Seen:
        return Seen(torch.zeros(layout.total))

    def prepare(self, accumulation: Accumulation, state: Seen, context: StepContext) -> None:
        state.steps += 1
        state.total += torch.cat([grad.flatten() for grad in accumulation.grads])

    def save(self, state: Seen, layout: Layout, copy: Copy) -> Part:
        return super().save(state, layout, copy)._replace(bucket={"steps": state.steps})

    def load(self, state: Seen, layout: Layout, shares: Shares) -> Callable[[], None]:
        parts = [share.arrays("total", layout) for share in shares.own]
        own = shares.own[0].bucket if shares.own else None
        steps = 0 if own is None else saved.read_int(own, "steps")

        def copy() -> None:
            state.steps = steps
            load_sum(state, "total", layout, parts, shares.factor)

        return copy


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Feedback.stages
    monkeypatch.setattr(Feedback, "stages", lambda self: [*stages(self), Watch()])


def totals(simulation: gradcomp.Simulation, rank: int = 0) -> dict[str, Tensor]:
    """Return the sums of a rank's gradients, by layer."""
    buckets = simulation._reducers[rank].buckets
    return {name: view for bucket in buckets for name, view in bucket.layout.views(bucket.states["watch"].total).items()}


def trained(bucket_mb: float = 25, world: int = 2) -> gradcomp.Simulation:
    simulation = gradcomp.Simulation("topk:ratio=0.1", SHAPES, world, bucket_mb=bucket_mb)
    simulation.step([{name: torch.full(shape, float(rank + 1)) for name, shape in SHAPES.items()} for rank in range(world)])
    return simulation


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("world,wanted", [(2, 1.0), (1, 1.5)])
@pytest.mark.parametrize("bucket_mb", [25, 1e-5])
def test_a_stage_saves_and_loads_its_own_part(world: int, wanted: float, bucket_mb: float) -> None:
    """By layer into any buckets and number of ranks; by bucket where the bucket has the same layers."""
    first, second = trained(), gradcomp.Simulation("topk:ratio=0.1", SHAPES, world, bucket_mb=bucket_mb)
    second.load_state_dict(first.state_dict())
    assert {float(part.unique()) for part in totals(second).values()} == {wanted}
    assert {bucket.states["watch"].steps for bucket in second._reducers[0].buckets} == {1 if bucket_mb == 25 else 0}


@pytest.mark.usefixtures("watched")
def test_a_stage_is_carried_over_to_another_spec() -> None:
    simulation = trained(bucket_mb=1e-5)
    simulation.change("sdagc:density=0.1")
    assert {float(part.unique()) for part in totals(simulation).values()} == {1.0}


@pytest.mark.usefixtures("watched")
def test_a_part_that_is_missing_is_named() -> None:
    state = trained().state_dict()
    del state["of_rank"]["1"]["layers"]["watch"]["total"]["b"]
    with pytest.raises(ValueError, match="the total of 'b' is not in the state"):
        gradcomp.Simulation("topk:ratio=0.1", SHAPES, 2).load_state_dict(state)


def test_an_exact_compressor_has_no_stages() -> None:
    """Each step starts from the gradients alone, which keep the loss scale."""
    (bucket,) = gradcomp.Simulation("dense", SHAPES, 1)._reducers[0].buckets
    assert not bucket.stages and not bucket.keeps_residual


def test_the_native_call_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages fill in one accumulation."""
    calls: list[Accumulation] = []
    run = Accumulation.run
    monkeypatch.setattr(Accumulation, "run", lambda self: calls.append(self) or run(self))
    simulation = gradcomp.Simulation("topk:ratio=0.1,clip=1", SHAPES, 1)
    for _ in range(3):
        simulation.step([{name: torch.ones(shape) for name, shape in SHAPES.items()}])
    assert len(calls) == 3 and all(each.scales is not None for each in calls)
