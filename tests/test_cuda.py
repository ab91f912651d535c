"""Whole steps on a GPU: nothing waits for it, any stream will do, and a dense step can be replayed as a CUDA graph. Nothing
of this runs without one."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import waiting
from devices import HAS_GPU
from torch import Tensor

import gradcomp
from gradcomp.engine.reducer import Options, Reducer
from gradcomp.engine.slots import Slot
from gradcomp.native import cuda_versions, extension, kernels
from gradcomp.networks.memory import Board, MemoryNetwork

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
    with waiting.forbidden():
        for own in grads[WARM:]:
            simulated.step([own])


def test_a_wait_in_a_step_would_be_found() -> None:
    with pytest.raises(RuntimeError, match="synchroniz"), waiting.forbidden():
        torch.ones(1, device="cuda").item()
    torch.ones(1, device="cuda").item()  # allowed again


def test_versions_of_cuda_fit() -> None:
    driver = cuda_versions.driver_version()
    assert extension.CUDA_VERSION > 0 and driver > 0
    assert cuda_versions.misfit(extension.CUDA_VERSION, driver, torch.version.cuda) == ""


def context() -> int | None:
    """Ask the driver for this thread's context; None if it has none."""
    found = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(found)) == 0
    return found.value


def flatten_on(device: str) -> None:
    kernels.flatten([torch.ones(9, device=device)], torch.empty(9, device=device))


def test_a_thread_without_a_context_has_none_after_a_call() -> None:
    seen: list[int | None] = []
    grad, flat = torch.ones(9, device="cuda"), torch.empty(9, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream

    def call() -> None:
        seen.append(context())
        extension.native.flatten([grad], flat, stream=stream)
        seen.append(context())

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert seen == [None, None] and flat.all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU: that the device is restored is NOT checked on two")
def test_the_device_that_was_current_is_current_again() -> None:
    for current, other in ((0, 1), (1, 0)):
        torch.cuda.set_device(current)
        before = context()
        flatten_on(f"cuda:{other}")
        assert torch.cuda.current_device() == current and context() == before
        assert torch.ones(1, device="cuda").device.index == current
    torch.cuda.set_device(0)


@pytest.mark.parametrize("spec", ["dense", "topk:ratio=1,wire=exact", "sdagc:small=none", "orq"])
def test_gradients_and_rounds_on_several_streams_wait_for_each_other(spec: str) -> None:
    """The first gradient comes late on its stream, and step() has a stream of its own."""
    size, device = 1 << 18, torch.device("cuda", 0)
    slots = {name: Slot(name, (size,), device) for name in "ab"}
    grads, updates = ({name: torch.empty(size, device=device) for name in "ab"} for _ in range(2))
    for name, slot in slots.items():
        slot.update = updates[name]
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for spread_out in (False, True):
        own = Reducer(gradcomp.make(spec), slots, MemoryNetwork(Board(1), 0, 1), Options())
        for _ in range(3):
            for name, grad in grads.items():
                grad.copy_(torch.randn(size, generator=torch.Generator().manual_seed(ord(name))))
            late = grads["a"].clone()
            grads["a"].zero_()
            torch.cuda.synchronize()
            first, second, third = streams if spread_out else [streams[0]] * 3
            with torch.cuda.stream(first):
                if spread_out:
                    torch.cuda._sleep(100_000_000)  # some 50 ms
                grads["a"].copy_(late)
                own.ready(slots["a"], grads["a"])
            with torch.cuda.stream(second):
                own.ready(slots["b"], grads["b"])
                if spread_out:
                    torch.cuda._sleep(100_000_000)
            with torch.cuda.stream(third):
                own.finish()
            torch.cuda.synchronize()
        found.append(torch.cat([*updates.values()]).cpu())
    assert torch.equal(*found) and found[0].any()


CAPTURE = """
import torch
from gradcomp.native import kernels

grads, flat = [torch.ones(9, device="cuda")], torch.zeros(9, device="cuda")
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        kernels.flatten(grads, flat)
except ValueError as error:
    print(error)
with torch.cuda.stream(stream):
    kernels.flatten(grads, flat)
stream.synchronize()
flat.zero_()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream):
    kernels.flatten(grads, flat)
print(flat.sum().item())
graph.replay()
print(flat.sum().item())
"""


def test_a_first_call_in_a_capture_is_refused_and_a_later_one_captured(tmp_path: Path) -> None:
    # In a folder of its own, since the checkout's gradcomp may be another than the one that is tested.
    done = subprocess.run([sys.executable, "-c", CAPTURE], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    refusal, captured, replayed = done.stdout.splitlines()
    assert refusal.startswith("flatten: its first call on cuda:0 falls into the capture of a graph")
    assert (captured, replayed) == ("0.0", "9.0")


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


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_dense_step_can_be_replayed_as_a_graph(elsewhere: bool) -> None:
    """elsewhere: the steps before the capture ran on another stream."""
    plain, captured = simulation("dense"), simulation("dense")
    stream, graph, inputs = torch.cuda.Stream(), torch.cuda.CUDAGraph(), draw(0)
    warm = torch.cuda.Stream() if elsewhere else stream
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(WARM):
            plain.step([inputs])
            captured.step([inputs])
    warm.synchronize()
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


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's, as the error ends the capture
@every_spec
def test_a_step_that_counts_is_not_captured(spec: str) -> None:
    if spec in ("dense", "half", "blocks"):  # no residual, nothing to count
        return
    simulated, inputs, stream = simulation(spec), draw(0), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        simulated.step([inputs])
    stream.synchronize()
    with pytest.raises(RuntimeError, match="counts its steps"), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        simulated.step([inputs])
    simulated.step([inputs])
