"""Process sets, and every kind of request over real Horovod, on three ranks."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from doors import ALONE, DOORS, Training

from gradcomp.core.requests import Field, Form, Gather, Payload, Reduce, Request, Send
from gradcomp.messages.payload import empty
from gradcomp.networks.horovod import HorovodNetwork
from gradcomp.networks.memory import Board

pytestmark = pytest.mark.slow

both_doors = pytest.mark.parametrize("door", DOORS)
DEVICE = torch.device("cpu")
FORM: Form = (Field("count", torch.int32, 1), Field("values", torch.float32, 5))


def trained(door: str, spec: str, name: str, process_set: Any) -> torch.Tensor:
    run = Training(door, spec=spec, prefix=f"{name}/{door}/{spec}.", bucket_mb=0.015, process_set=process_set)
    weights = run.train(10)
    if run.handle is not None:
        run.handle.load_state_dict(run.handle.state_dict())  # as a script does that resumes
    return weights


def payload(*tag: int) -> Payload:
    """Different for every tag, and so for every sender, receiver and round."""
    made = empty(FORM, DEVICE)
    made.bytes.zero_()
    made["count"][0] = tag[0]
    made["values"].copy_(torch.tensor([float(x) for x in tag] + [0.5] * (5 - len(tag))))
    return made


def swap(rank: int, size: int, turn: int) -> Request:
    """Ranks 0 and 1 exchange; 2 is idle."""
    return Send({1 - rank: payload(rank, turn, 1 - rank)} if rank < 2 else {}, [1 - rank] if rank < 2 else (), FORM, DEVICE)


def spread(rank: int, size: int, turn: int) -> Request:
    """Rank 1 to everybody, itself included."""
    return Send({other: payload(rank, turn, other) for other in range(size)} if rank == 1 else {}, [1], FORM, DEVICE)


def ring(rank: int, size: int, turn: int) -> Request:
    return Send({(rank + 1) % size: payload(rank, turn)}, [(rank - 1) % size], FORM, DEVICE)


def collect(rank: int, size: int, turn: int) -> Request:
    """All to rank 2."""
    return Send({2: payload(rank, turn)}, range(size) if rank == 2 else (), FORM, DEVICE)


def everybody(rank: int, size: int, turn: int) -> Request:
    return Send({other: payload(rank, turn, other) for other in reversed(range(size))}, range(size), FORM, DEVICE)


def nobody(rank: int, size: int, turn: int) -> Request:
    return Send({}, (), FORM, DEVICE)


def gather(rank: int, size: int, turn: int) -> Request:
    return Gather(payload(rank, turn))


def total(rank: int, size: int, turn: int) -> Request:
    return Reduce(torch.arange(7.0) * (rank + 1) + turn)


def mean(rank: int, size: int, turn: int) -> Request:
    return Reduce(torch.arange(8.0) * (rank + 1) + turn, scale=0.25)


def readable(reply: Any) -> Any:
    if isinstance(reply, torch.Tensor):
        return reply.tolist()
    plain = {key: part.bytes.tolist() for key, part in (reply.items() if isinstance(reply, dict) else enumerate(reply))}
    return [plain, [part["values"].tolist() for part in (reply.values() if isinstance(reply, dict) else reply)]]


def exchange(network: HorovodNetwork, kind: Any) -> list[list[Any]]:
    """Three rounds under one name, as in three steps: what came, and what the simulator says should come."""
    me, size = hvd.rank(), hvd.size()
    rounds = []
    for turn in range(3):
        came = readable(network.start(kind(me, size, turn), kind.__name__)())
        board = Board(size)
        posted = [board.post("", rank, kind(rank, size, turn)) for rank in range(size)]
        rounds.append([came, [readable(posted[rank].reply(rank)) for rank in range(size)][me]])
    return rounds


def unheard(network: HorovodNetwork) -> str:
    """Rank 0 waits for 1, which has nothing to say; 2 hears itself."""
    me = hvd.rank()
    own = Send({2: payload(2, 0)} if me == 2 else {}, [[1], [], [2]][me], FORM, DEVICE)
    return small_net.refused(lambda: network.start(own, "unheard")())


KINDS = (swap, spread, ring, collect, everybody, nobody, gather, total, mean)


def program() -> dict[Any, Any]:
    """Train in a set and in all ranks, and exchange requests of every kind."""
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    found: dict[Any, Any] = {}
    if pair.included():  # rank 1 has no part in this, and does not know of it
        for door in (ALONE, *DOORS):
            for spec in ("topk:ratio=1,wire=exact", "topk:ratio=0.01", "dense"):
                found["members", door, spec] = trained(door, spec, "members", pair)
    for door in DOORS:  # an optimizer of all ranks after one of some
        found["all", door] = trained(door, "topk:ratio=0.01", "all", hvd.global_process_set)
    for door in DOORS:  # every rank makes the optimizer; it works in the set alone, elsewhere each trains by itself
        found["everywhere", door] = trained(door, "topk:ratio=0.01", "everywhere", pair)
    network = HorovodNetwork(hvd.global_process_set)
    network.prefix = "test"
    for kind in KINDS:
        found["exchange", kind.__name__] = exchange(network, kind)
    found["unheard"] = unheard(network)
    return found


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch(program, 3)


@both_doors
@pytest.mark.parametrize("spec", ["dense", "topk:ratio=1,wire=exact"])
def test_within_a_set_training_is_horovods_own(spec: str, door: str) -> None:
    """Two members: a sum of two gradients has one order. Updates that are subtracted from the start round once more."""
    for rank in (0, 2):
        own = found()[rank]
        rounding = {"rtol": 0, "atol": 0} if spec == "dense" else {"rtol": 1e-5, "atol": 1e-7}
        torch.testing.assert_close(own["members", door, spec], own["members", ALONE, spec], **rounding)


@both_doors
def test_the_members_of_a_set_hold_the_same_weights(door: str) -> None:
    key = ("members", door, "topk:ratio=0.01")
    assert torch.equal(found()[0][key], found()[2][key])
    assert key not in found()[1]


@both_doors
def test_all_ranks_train_together_after_some_did(door: str) -> None:
    """Names of operations must not depend on what a rank did in a set that others are not in."""
    first, *others = (rank["all", door] for rank in found())
    assert all(torch.equal(first, other) for other in others)


@both_doors
def test_a_rank_outside_the_set_trains_by_itself(door: str) -> None:
    first, outside, second = (rank["everywhere", door] for rank in found())
    assert torch.equal(first, second)
    assert not torch.equal(first, outside)


@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_horovod_answers_as_the_simulator_does(kind: str) -> None:
    """Byte for byte, also to a rank that sends nothing; sums of small whole numbers are exact."""
    for rank in found():
        for came, expected in rank["exchange", kind]:
            assert came == expected


def test_a_sender_that_says_nothing_is_found_out() -> None:
    first, *others = (rank["unheard"] for rank in found())
    assert "unheard: expected payloads from ranks [1], got them from []; check that all ranks are at the same" in first
    assert others == ["nothing was raised"] * 2
