"""States: a change of spec carries residuals and velocities over; a state of another format is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gradcomp
from gradcomp.engine.states import packed

SHAPES = {"a.weight": (60, 50), "a.bias": (60,), "b.weight": (40, 60)}


def draw(seed: int, ranks: int, size: float = 1.0) -> list[dict[str, Tensor]]:
    torch.manual_seed(seed)
    return [{name: size * torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(ranks)]


@pytest.mark.parametrize(
    "after,kept",
    [
        ("sdagc:lam=2", "sdagc:lam=2"),
        ("topk:ratio=0.2", "topk:ratio=0.2"),
        ("dense", "dense:feedback=true"),
        ("sdagc; *.bias=dense", "sdagc; *.bias=dense:feedback=true"),
    ],
)
def test_changing_the_spec_carries_the_residual_over(after: str, kept: str) -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.01,momentum=0.9", SHAPES, 2)
    simulation.step(draw(0, 2))
    before = [simulation.residual(rank) for rank in range(2)]
    simulation.change(after)
    assert str(simulation._compressor) == kept
    for rank in range(2):
        assert all(torch.equal(simulation.residual(rank)[name], before[rank][name]) for name in SHAPES)
    grads = draw(1, 2)
    update = simulation.step(grads)
    for name in SHAPES:
        left = sum(simulation.residual(rank)[name] for rank in range(2)) / 2
        wanted = sum(before[rank][name] + grads[rank][name] for rank in range(2)) / 2
        torch.testing.assert_close(left + update[name], wanted, rtol=1e-6, atol=1e-6)  # float32 sums in another order
    assert simulation.stats()["steps"] == 2


def test_changing_keeps_the_velocity_where_both_have_one() -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.01,momentum=0.9", SHAPES, 1)
    simulation.step(draw(0, 1))
    before = simulation.state_dict()["of_rank"]["0"]["velocity"]
    simulation.change("sdagc:momentum=0.5,small=none")
    after = simulation.state_dict()["of_rank"]["0"]["velocity"]
    assert all(torch.equal(before[name], after[name]) for name in SHAPES)


@pytest.mark.parametrize("saved_as", [None, 1, 2, packed.FORMAT + 1])
def test_a_state_of_another_format_is_refused(saved_as: int | None) -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.01", SHAPES, 1)
    state = {**simulation.state_dict(), "format": saved_as}
    if saved_as is None:
        del state["format"]
    with pytest.raises(ValueError, match=f"has format {saved_as or 1}, but this gradcomp reads format {packed.FORMAT}"):
        simulation.load_state_dict(state)
