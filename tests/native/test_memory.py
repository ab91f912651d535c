"""Owned memory: a lent update comes back as zeros, is lent once at a time, and goes with its owner."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass

import gradients
import pytest
import torch
from laws import check_conservation
from payload_arrays import entries

import gradcomp
from gradcomp.compressors.topk import TopK
from gradcomp.core.compressor import Acc, Compressor, Steps
from gradcomp.core.requests import World, gather, reduce
from gradcomp.messages.sparse import EXACT
from gradcomp.native import extension, kernels
from gradcomp.native.memory import Memory, Update

SHAPES = {"a": (40, 31), "b": (700,), "c": (12, 9), "d": (300,)}


@dataclass(frozen=True)
class Early(Compressor):
    """Asks for its update first, and writes to it between and after two rounds."""

    def exchange(self, acc: Acc, state: None, world: World) -> Steps:
        update = acc.memory.lend(acc.residual.numel(), acc.residual.device)
        for share in (0.1, 0.2):
            taken = EXACT.take(acc, max(1, int(share * acc.residual.numel())))
            payload = EXACT.pack(taken, acc.residual)
            came = yield from gather(payload)
            EXACT.add(update, came, 1 / world.size)
            yield from reduce(torch.zeros(1))
        return update


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("bucket_mb", [25, 0.004, 0.0004])
def test_a_compressor_may_yield_between_asking_for_its_update_and_returning_it(world: int, bucket_mb: float) -> None:
    """Conservation holds with several buckets on their way at once."""
    simulation = gradcomp.Simulation(Early(), SHAPES, world, bucket_mb=bucket_mb)
    for step in range(4):
        grads = [
            {
                name: gradients.draw("normal", torch.Size(shape).numel(), 9 * step + rank).view(shape)
                for name, shape in SHAPES.items()
            }
            for rank in range(world)
        ]
        check_conservation(simulation, grads)
    assert simulation.stats()["buckets"] == {25: 1, 0.004: 3, 0.0004: 4}[bucket_mb]


def test_two_updates_that_are_lent_at_once_are_two() -> None:
    memory = Memory()
    first, second = (memory.lend(1000, torch.device("cpu")) for _ in range(2))
    kernels.add_sparse(first.flat, **entries([2.0], [5]), marks=first.marks)
    assert not second.flat.any() and first.flat[5] == 2


def test_a_returned_update_is_lent_again_as_zeros() -> None:
    memory = Memory()
    for n in (1000, 100, 1000, 64, 500):  # shorter ones fit into the first
        update = memory.lend(n, torch.device("cpu"))
        assert update.flat.numel() == n and not update.flat.any() and update.marks is not None and not update.marks.any()
        kernels.add_sparse(update.flat, **entries([2.0], [n - 1]), marks=update.marks)
        kernels.add_sparse(update.flat, **entries([3.0], [0]), marks=update.marks)
        at = update.flat.data_ptr()
        memory.give_back(update)
        assert memory.lend(10, torch.device("cpu")).flat.data_ptr() == at
        memory = memory if n == 1000 else Memory()


def test_a_larger_update_takes_the_place_of_a_smaller_one() -> None:
    memory = Memory()
    for n in (10, 100, 1000):
        memory.give_back(memory.lend(n, torch.device("cpu")))
    assert [len(sheet.flat) for sheets in memory._free.values() for sheet in sheets] == [1000]


def test_an_update_that_is_not_on_loan_is_left_alone() -> None:
    memory = Memory()
    own = Update(torch.ones(10))
    memory.give_back(own)
    assert own.flat.all()
    lent = memory.lend(10, torch.device("cpu"))
    memory.give_back(lent)
    memory.give_back(lent)
    assert sum(map(len, memory._free.values())) == 1


def test_every_update_that_is_lent_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver of an exchange does so, also inside a host: a step then needs no new memory."""
    made: list[int] = []
    lend = Memory.lend

    def counted(self: Memory, n: int, device: torch.device) -> Update:
        before = sum(map(len, self._free.values()))
        update = lend(self, n, device)
        made.append(before == sum(map(len, self._free.values())))
        return update

    monkeypatch.setattr(Memory, "lend", counted)
    for spec in (
        "topk:ratio=0.1",
        "topk:ratio=0.1,by_host=true",
        "topk:route=split,ratio=0.3",
        "gtopk",
        "gs_sgd",
        "lgc:dense=0,learn=2",
    ):
        simulation = gradcomp.Simulation(spec, SHAPES, 4, bucket_mb=0.004, ranks_per_host=2)
        for step in range(4):
            made.clear()
            simulation.step([{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(4)])
            assert step == 0 or not any(made), spec


def test_scratch_is_kept_apart_by_use_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, like, at = Memory(), torch.zeros(1), set()
    for stream in (1, 2):
        monkeypatch.setattr(extension, "stream", lambda array, stream=stream: stream)
        at |= {memory.scratch(use, 10, like).data_ptr() for use in ("a", "b", "a")}
    assert len(at) == 4


@pytest.mark.parametrize("broken", ["shape", "in the middle", "delivery"])
def test_a_simulation_goes_on_after_a_failed_step(broken: str) -> None:
    """The next step has its own gradients alone."""
    simulation = gradcomp.Simulation("topk:ratio=0.1,route=split", SHAPES, 3, bucket_mb=0.004)
    grads = [{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(3)]
    simulation.step(grads)
    bucket = simulation._reducers[1].buckets[0]
    compressor = bucket.compressor
    if broken == "shape":
        with pytest.raises(ValueError, match="has shape"):
            simulation.step([grads[0], grads[1] | {"c": torch.randn(3)}, grads[2]])
    else:
        bucket.compressor = Failing(0.1, "split")
        with pytest.raises(RuntimeError, match="on purpose"):
            simulation.step(grads)
        bucket.compressor = compressor
    check_conservation(simulation, grads)


@pytest.mark.parametrize("spec", ["topk:ratio=0.01,warmup=10", "sdagc:flush=5,small=none"])
@pytest.mark.parametrize("bad", [torch.randn(3), torch.randn(12, 9).double()])
def test_ranks_stay_in_step_after_input_that_was_refused(spec: str, bad: torch.Tensor) -> None:
    simulation = gradcomp.Simulation(spec, SHAPES, 3, bucket_mb=0.004)
    grads = [{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(3)]
    for step in range(12):
        if step == 2:
            before = simulation.residual(0)
            with pytest.raises((ValueError, TypeError), match="rank 1: "):
                simulation.step([grads[0], grads[1] | {"c": bad}, grads[2]])
            assert all(torch.equal(kept, before[name]) for name, kept in simulation.residual(0).items())
        check_conservation(simulation, grads)


@dataclass(frozen=True)
class Failing(TopK):
    """Raises between its first request and its second."""

    def exchange(self, acc: Acc, state: None, world: World) -> Steps:
        steps = super().exchange(acc, state, world)
        yield next(steps)
        raise RuntimeError("on purpose")


def test_a_compressor_that_returns_no_update_gets_a_sentence() -> None:
    with pytest.raises(TypeError, match=r"Bare.* returned a Tensor; an exchange returns an Update"):
        gradcomp.Simulation(Bare(), {"w": (3,)}, 1).step([{"w": torch.ones(3)}])


@dataclass(frozen=True)
class Bare(Compressor):
    def exchange(self, acc: Acc, state: None, world: World) -> Steps:
        total = yield from reduce(acc.residual)
        return total  # type: ignore[return-value]


def test_memory_goes_with_its_owner_and_so_does_that_of_an_ended_thread() -> None:
    alive: list[weakref.ref[object]] = []

    def train() -> None:
        simulation = gradcomp.Simulation("topk:ratio=0.1", SHAPES, 2)
        simulation.step([{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(2)])
        (sheet,) = (sheet for sheets in simulation._sessions[0].reducer.context.memory._free.values() for sheet in sheets)
        scratch = simulation._sessions[0].reducer.context.memory._scratch.values()
        alive.extend(weakref.ref(tensor) for tensor in (sheet.flat, sheet.marks, *scratch))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    gc.collect()
    assert len(alive) == 5 and [ref for ref in alive if ref() is not None] == []
