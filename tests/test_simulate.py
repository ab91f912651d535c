"""The simulator as a user meets it: results that stay, sentences for wrong input, what its network checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import gradcomp
from gradcomp.core.compressor import Acc, Compressor, Steps
from gradcomp.core.requests import Field, Gather, Payload, Reduce, Send, World, reduce
from gradcomp.messages import payload as payloads
from gradcomp.native.memory import Update
from gradcomp.networks.memory import Board, Round


def simulation(world: int = 2) -> gradcomp.Simulation:
    return gradcomp.Simulation("dense", {"w": (2, 3), "b": (4,)}, world)


def grads(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((2, 3), float(value)), "b": torch.full((4,), float(value))}


def test_updates_stay_as_they_are_while_somebody_holds_them() -> None:
    s = simulation(1)
    first = s.step([grads(1)])
    kept = first["b"][1:3]
    second = s.step([grads(2)])
    assert (first["w"] == 1).all() and (kept == 1).all() and (second["w"] == 2).all()
    del first
    third = s.step([grads(3)])
    assert (kept == 1).all() and (second["w"] == 2).all() and (third["b"] == 3).all()


def test_gradients_are_only_read() -> None:
    own = grads(1)
    gradcomp.Simulation("topk:ratio=0.5", {"w": (2, 3), "b": (4,)}, 1).step([own])
    assert (own["w"] == 1).all() and (own["b"] == 1).all()


def test_wrong_input_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match="world=0 must be at least 1: a simulation needs at least one rank"):
        simulation(0)
    with pytest.raises(ValueError, match=r"step\(\) got gradients of 1 ranks, but the simulation has 2"):
        simulation().step([grads(1)])
    with pytest.raises(ValueError, match="rank 1: there is no parameter 'v'; known: w, b"):
        simulation().step([grads(1), {"v": torch.zeros(1)}])
    with pytest.raises(ValueError, match=r"rank 0: 'w' has shape \(2, 3\), but its gradient has \(3, 2\)"):
        simulation().step([{"w": torch.zeros(3, 2)}, {}])
    with pytest.raises(TypeError, match=r"the gradient of 'b' is torch\.int64; gradcomp takes float32"):
        simulation(1).step([{"b": torch.ones(4, dtype=torch.int64)}])
    weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="needs named_parameters= with the same names as shapes"):
        gradcomp.Simulation("dense", {"w": (1,)}, 1, optimizer=torch.optim.SGD([weight], lr=0.5))
    with pytest.raises(ValueError, match="bucket_mb=0 must be a number above 0"):
        gradcomp.Simulation("dense", {"w": (1,)}, 1, bucket_mb=0)
    with pytest.raises(ValueError, match="bucket_mb='25' must be a number above 0"):
        gradcomp.Simulation("dense", {"w": (1,)}, 1, bucket_mb="25")  # type: ignore[arg-type]
    for seed in (2**62, "1", 0.5):
        with pytest.raises(ValueError, match=rf"seed={seed!r} must be a whole number between"):
            gradcomp.Simulation("dense", {"w": (1,)}, 1, seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shapes,said",
    [
        (None, "shapes= is a NoneType; pass {name: shape}"),
        ([("w", (2, 3))], "shapes= is a list; pass {name: shape}"),
        ({"w": 6}, r"the shape 6 of 'w' must be whole numbers"),
        ({"w": (2.5,)}, r"the shape \[2\.5\] of 'w' must be whole numbers"),
        ({"w": (-2, -3)}, r"the shape \[-2, -3\] of 'w' must be whole numbers that are not negative"),
        ({"b": (4,), "w": (2**33, 2**33)}, rf"'w' has {2**66} entries, but a layer must have fewer than 2\^31"),
    ],
)
def test_shapes_that_cannot_be_get_a_sentence(shapes: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gradcomp.Simulation("dense", shapes, 2)


@pytest.mark.parametrize("name", ["sketched_sgd", "gs_sgd"])
def test_a_table_larger_than_the_model_is_neither_made_nor_sent(name: str) -> None:
    s = gradcomp.Simulation(f"{name}:columns={2**63}", {"w": (2, 3), "b": (4,)}, 2)
    update = s.step([grads(1), grads(3)])
    assert (update["w"] == 2).all() and (update["b"] == 2).all()


def test_a_state_of_something_else_is_refused() -> None:
    state = gradcomp.Simulation("topk", {"w": (5,)}, 2).state_dict()
    with pytest.raises(ValueError, match=r"saved with 'topk' and cannot continue with 'topk:ratio=0\.5'"):
        gradcomp.Simulation("topk:ratio=0.5", {"w": (5,)}, 2).load_state_dict(state)
    with pytest.raises(ValueError, match="does not fit the model: only one of them has v, w; load it"):
        gradcomp.Simulation("topk", {"v": (5,)}, 2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"'w' has shape '\(6,\)', in the state '\(5,\)'"):
        gradcomp.Simulation("topk", {"w": (6,)}, 2).load_state_dict(state)


@dataclass(frozen=True)
class Nondeterministic(Compressor):
    def exchange(self, acc: Acc, state: None, world: World) -> Steps:
        total = yield from reduce(acc.residual.clone())
        return Update(total + world.rank)


def test_ranks_that_come_to_different_updates_are_found_out() -> None:
    s = gradcomp.Simulation(Nondeterministic(), {"w": (3,)}, 2)
    with pytest.raises(RuntimeError, match="rank 1 has another update of 'w' than rank 0"):
        s.step([{}, {}])


@dataclass(frozen=True)
class Unshared(Compressor):
    """A compressor whose meeting fails on the rank of this number."""

    rank: int
    error: type[Exception]

    def exchange(self, acc: Acc, state: None, world: World) -> Steps:
        return Update((yield from reduce(acc.residual.clone())))

    def save_shared(self, state: None) -> Any:
        MEETINGS.append(self)
        if len(MEETINGS) == self.rank + 1:
            raise self.error("no state to share")


MEETINGS: list[Compressor] = []


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_change_that_fails_on_one_rank_leaves_all_ranks_alike(rank: int, error: type[Exception]) -> None:
    s = simulation()
    s.step([grads(1), grads(1)])
    MEETINGS.clear()
    with pytest.raises(error, match="no state to share"):
        s.change(Unshared(rank, error))
    s.step([grads(1), grads(1)])
    s.change("topk:ratio=1,wire=exact")
    assert (s.step([grads(1), grads(3)])["w"] == 2).all()


CPU, FORM = torch.device("cpu"), (Field("x", torch.float32, 2),)


def test_the_board_answers_every_kind_of_request() -> None:
    board = Board(3)

    def payload(value: float) -> Payload:
        made = payloads.empty(FORM, CPU)
        made["x"].fill_(value)
        return made

    rounds: dict[tuple[str, int], Round] = {}
    for rank in range(3):
        rounds["g", rank] = board.post("g", rank, Gather(payload(rank)))
        rounds["r", rank] = board.post("r", rank, Reduce(torch.full((2,), float(rank)), scale=0.5))
        parts = {2 - rank: payload(10 + rank)} if rank != 1 else {}
        rounds["s", rank] = board.post("s", rank, Send(parts, [2 - rank] if rank != 1 else [], FORM, CPU))
    for rank in range(3):
        gathered = rounds["g", rank].reply(rank)
        assert isinstance(gathered, list) and [p["x"].tolist() for p in gathered] == [[0, 0], [1, 1], [2, 2]]
        total = rounds["r", rank].reply(rank)
        assert isinstance(total, Tensor) and total.tolist() == [1.5, 1.5]
        received = rounds["s", rank].reply(rank)
        assert isinstance(received, dict)
        assert {sender: p["x"][0].item() for sender, p in received.items()} == [{2: 12.0}, {}, {0: 10.0}][rank]


def test_a_sender_that_says_nothing_is_found_out() -> None:
    board = Board(2)
    own = board.post("x", 0, Send({}, [1], FORM, CPU))
    board.post("x", 1, Send({}, [], FORM, CPU))
    with pytest.raises(RuntimeError, match=r"x: expected payloads from ranks \[1\], got them from \[\]"):
        own.reply(0)


@pytest.mark.parametrize("spec", ["blocks", "half", "orq", "linear", "bingrad", "terngrad", "sign", "topk", "sdagc"])
def test_rounding_lifts_no_entry_by_more_than_a_third(spec: str) -> None:
    """So much of float16's range is left to rounding."""
    largest = 49_000.0
    signs = torch.randn(4096, generator=torch.Generator().manual_seed(0)).sign()
    for low in (0.0, 0.9 * largest, largest):
        own = {"w": (torch.linspace(low, largest, 4096) * signs).half()}
        update = gradcomp.Simulation(spec, {"w": (4096,)}, 2).step([own, own])["w"]
        assert update.half().isfinite().all() and update.abs().max() <= 4 / 3 * largest


def test_ranks_that_ask_for_different_things_are_found_out() -> None:
    board = Board(2)
    own = board.post("x", 0, Reduce(torch.zeros(1)))
    board.post("x", 1, Gather(payloads.wrap(torch.zeros(1))))
    with pytest.raises(RuntimeError, match=r"x: the ranks posted different requests \(Reduce, Gather\)"):
        own.reply(0)
