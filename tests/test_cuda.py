"""Whole steps on a GPU: nothing waits for it, any stream will do, and a step can be replayed as a CUDA graph. Nothing of this
runs without one."""

from __future__ import annotations

import pytest
import torch
from devices import HAS_GPU
from torch import Tensor

import gradcomp

pytestmark = pytest.mark.skipif(not HAS_GPU, reason="there is no GPU: whole steps on one are NOT checked")

SHAPES = {"a.weight": (64, 3, 7, 7), "b.weight": (256, 512), "b.bias": (256,), "c.weight": (10, 256), "c.bias": (10,)}
SPECS = [name for name in gradcomp.names() if name != "lgc"] + [
    "lgc:dense=0,learn=1,ratio=0.01",
    "topk:momentum=0.9,wire=exact",
    "sdagc:small=pool,momentum=0.9",
    "orq:levels=9,sigmas=2.5,route=allgather",
    "orq:route=alltoall",
]
every_spec = pytest.mark.parametrize("spec", SPECS)
WARM = 4


def draw(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator).cuda() for name, shape in SHAPES.items()}


def simulation(spec: str) -> gradcomp.Simulation:
    return gradcomp.Simulation(spec, SHAPES, 1, device="cuda")


@every_spec
def test_no_step_waits_for_the_gpu(spec: str) -> None:
    simulated = simulation(spec)
    grads = [draw(step) for step in range(WARM + 3)]
    for own in grads[:WARM]:
        simulated.step([own])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for own in grads[WARM:]:
            simulated.step([own])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_spec
def test_a_stream_of_ones_own_makes_no_difference(spec: str) -> None:
    plain, streamed = simulation(spec), simulation(spec)
    stream = torch.cuda.Stream()
    for step in range(WARM):
        grads = draw(step)
        wanted = plain.step([grads])
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = streamed.step([grads])
        stream.synchronize()
        assert all(torch.equal(found[name], wanted[name]) for name in SHAPES)


@every_spec
def test_a_gpu_updates_as_a_cpu_does(spec: str) -> None:
    """To the last bit where nothing is summed up in another order; statistics of layers are, and torch's own sums."""
    on_gpu, on_cpu = simulation(spec), gradcomp.Simulation(spec, SHAPES, 1)
    for step in range(WARM):
        grads = draw(step)
        found, wanted = on_gpu.step([grads]), on_cpu.step([{name: grad.cpu() for name, grad in grads.items()}])
        close = {name: torch.isclose(found[name].cpu(), wanted[name], rtol=1e-3, atol=1e-5) for name in SHAPES}
        # Where sums differ in their last bits an entry may be on the other side of a threshold, or be rounded the other way.
        assert sum(int((~same).sum()) for same in close.values()) <= 1e-3 * sum(same.numel() for same in close.values())


@pytest.mark.parametrize("spec", ["dense", "topk:ratio=0.01", "topk:ratio=0.01,momentum=0.9", "sdagc:density=0.01"])
def test_a_step_can_be_replayed_as_a_graph(spec: str) -> None:
    plain, captured = simulation(spec), simulation(spec)
    stream, graph, inputs = torch.cuda.Stream(), torch.cuda.CUDAGraph(), draw(0)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            plain.step([inputs])
            captured.step([inputs])
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        update = captured.step([inputs])
    for step in range(1, 4):
        with torch.cuda.stream(stream):
            for name, own in draw(step).items():
                inputs[name].copy_(own)
            graph.replay()
            wanted = plain.step([inputs])
        stream.synchronize()
        assert all(torch.equal(update[name], wanted[name]) for name in SHAPES), step
