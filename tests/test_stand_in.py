"""Whole steps on a GPU that is none: nothing waits for it, no atomic sums floats, and no step that counts is captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from laws import SHAPES, check_conservation, draw
from specs import ALL
from stand_in import GPU, StandIn, stand_in
from torch.optim import Optimizer

import gradcomp

WORLD = 2
SPECS = [
    *ALL,
    "topk:momentum=0.9,route=tree",
    "gs_sgd:momentum=0.9",
    "topk:clip=1",
    "lgc:dense=0,learn=1,ratio=0.1,window=64",
    "lgc:dense=0,learn=1,ratio=0.1,window=64,instance=server,innovation=0.01",
]
# Steps of which the first may wait for the GPU: they make state, and lgc changes its phase.
WARM = 2


@pytest.fixture
def gpu(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with stand_in(emulator, monkeypatch) as mode:
        yield mode


@pytest.mark.parametrize("spec", SPECS)
def test_no_step_waits_or_sums_by_atomics(spec: str, gpu: StandIn) -> None:
    simulation = gradcomp.Simulation(spec, SHAPES, WORLD, device="cuda")
    steps = [draw("normal", step, WORLD, GPU) for step in range(WARM + 1)]
    for grads in steps[:WARM]:
        simulation.step(grads)
    gpu.waits.clear()
    simulation.step(steps[WARM])
    # A simulation compares the ranks' updates, and looks once at each bucket, whether the step failed in it.
    waits, buckets = Counter(gpu.waits), sum(len(each.buckets) for each in simulation._reducers)
    assert waits.keys() <= {"equal", "__bool__"} and waits["__bool__"] <= buckets and gpu.sums == []


@pytest.mark.parametrize("optimizer_of", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.AdamW, lr=0.1)])
@pytest.mark.parametrize("spec", ["topk", "sdagc"])
def test_no_step_waits_with_an_optimizers_momentum(spec: str, optimizer_of: Callable[..., Optimizer], gpu: StandIn) -> None:
    named = {name: torch.nn.Parameter(torch.zeros(shape, device="cuda")) for name, shape in SHAPES.items()}
    optimizer = optimizer_of(named.values(), foreach=False)
    simulation = gradcomp.Simulation(spec, SHAPES, 1, device="cuda", optimizer=optimizer, named_parameters=[*named.items()])
    simulation.stats()  # steps then measure the norm of gradients
    for step in range(12):  # ranks compare Adam's noise after eight
        grads = draw("normal", step, 1, GPU)
        gpu.waits.clear()
        updates = simulation.step(grads)
        assert step < WARM or gpu.waits == ["__bool__"] * len(simulation._reducers[0].buckets)  # has the step failed?
        for name, parameter in named.items():
            parameter.grad = updates[name]
        optimizer.step()


def test_a_wait_and_an_atomic_sum_would_be_found(gpu: StandIn) -> None:
    ones, places = torch.ones(4, device="cuda"), torch.zeros(4, dtype=torch.int64, device=GPU)
    assert ones.is_cuda and ones.device == GPU and (ones + 1).is_cuda and not ones.cpu().is_cuda
    gpu.waits.clear()
    for wait in (
        lambda: bool(ones[0] > 0),
        lambda: float(ones.sum()),
        lambda: ones[ones > 0],
        lambda: ones.__setitem__(places, 1),
        lambda: ones.to("cpu"),
        lambda: torch.tensor([1.0], device="cuda"),
        lambda: ones.nonzero(),
        lambda: ones[places[0]],
    ):
        wait()
        assert gpu.waits, wait
        gpu.waits.clear()
    (2 * ones).clamp_(max=1).index_fill_(0, places, 1)[1:3] = 0
    torch.full((3,), 2.0, device="cuda").copy_(ones[:3])
    assert gpu.waits == []
    ones.mul_(1e-39).index_add_(0, places, ones.clone())
    torch.zeros_like(places).index_add_(0, places, places)
    assert gpu.sums == ["index_add_"] and ones.tolist()[0] == 0 < ones.tolist()[1]


@pytest.mark.parametrize("spec", ["gtopk", "topk:route=split", "topk:route=split,wire=exact", "topk:route=tree", "sdagc"])
def test_subnormal_numbers_are_conserved(spec: str, gpu: StandIn) -> None:
    simulation = gradcomp.Simulation(spec, SHAPES, WORLD, device="cuda")
    for step in range(3):
        check_conservation(simulation, draw("tiny", step, WORLD, GPU))


@pytest.mark.parametrize("spec", ["topk", "orq", "gs_sgd", "dense:feedback=true"])
def test_a_step_that_counts_is_not_captured(spec: str, gpu: StandIn) -> None:
    simulation, grads = gradcomp.Simulation(spec, {"w": (70,)}, 1, device="cuda"), [{"w": torch.ones(70, device="cuda")}]
    simulation.step(grads)
    gpu.is_capturing = True
    with pytest.raises(RuntimeError, match=f"^{spec}.* counts its steps on the host, and a CUDA graph would repeat"):
        simulation.step(grads)
    gpu.is_capturing = False
    assert simulation.step(grads)["w"].isfinite().all()


def test_a_dense_step_is_captured(gpu: StandIn) -> None:
    simulation, grads = gradcomp.Simulation("dense", {"w": (70,)}, 1, device="cuda"), [{"w": torch.ones(70, device="cuda")}]
    simulation.step(grads)
    gpu.is_capturing = True
    assert simulation.step(grads)["w"].tolist() == [1.0] * 70
