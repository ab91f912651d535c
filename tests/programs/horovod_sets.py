"""Training within a process set, on some of the ranks or beside another set; and requests of every kind over real Horovod."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import ranks
import torch
import training

from gradcomp.messages.payload import empty
from gradcomp.networks.horovod import HorovodNetwork
from gradcomp.networks.memory import Board
from gradcomp.requests import Field, Form, Gather, Payload, Reduce, Request, Send

pair = hvd.ProcessSet([0, 2])
hvd.init(process_sets=[pair])
me, size = hvd.rank(), hvd.size()
found: dict[Any, Any] = {}
DEVICE = torch.device("cpu")
FORM: Form = (Field("count", torch.int32, 1), Field("values", torch.float32, 5))


def trained(route: str, spec: str, name: str, process_set: Any) -> torch.Tensor:
    model = training.net()
    optimizer = training.sgd(route, model, spec, prefix=f"{name}/{route}/{spec}.", bucket_mb=0.015, process_set=process_set)
    return training.train(model, optimizer, training.batches(), 10)


def payload(*tag: int) -> Payload:
    """Different for every tag, and so for every sender, receiver and round."""
    made = empty(FORM, DEVICE)
    made.bytes.zero_()
    made["count"][0] = tag[0]
    made["values"].copy_(torch.tensor([float(x) for x in tag] + [0.5] * (5 - len(tag))))
    return made


def swap(rank: int, turn: int) -> Request:
    """Ranks 0 and 1 exchange; 2 is idle."""
    return Send({1 - rank: payload(rank, turn, 1 - rank)} if rank < 2 else {}, [1 - rank] if rank < 2 else (), FORM, DEVICE)


def spread(rank: int, turn: int) -> Request:
    """Rank 1 to everybody, itself included."""
    return Send({other: payload(rank, turn, other) for other in range(size)} if rank == 1 else {}, [1], FORM, DEVICE)


def ring(rank: int, turn: int) -> Request:
    return Send({(rank + 1) % size: payload(rank, turn)}, [(rank - 1) % size], FORM, DEVICE)


def collect(rank: int, turn: int) -> Request:
    """All to rank 2."""
    return Send({2: payload(rank, turn)}, range(size) if rank == 2 else (), FORM, DEVICE)


def everybody(rank: int, turn: int) -> Request:
    return Send({other: payload(rank, turn, other) for other in reversed(range(size))}, range(size), FORM, DEVICE)


def nobody(rank: int, turn: int) -> Request:
    return Send({}, (), FORM, DEVICE)


def gather(rank: int, turn: int) -> Request:
    return Gather(payload(rank, turn))


def total(rank: int, turn: int) -> Request:
    return Reduce(torch.arange(7.0) * (rank + 1) + turn)


def mean(rank: int, turn: int) -> Request:
    return Reduce(torch.arange(8.0) * (rank + 1) + turn, scale=0.25)


def readable(reply: Any) -> Any:
    if isinstance(reply, torch.Tensor):
        return reply.tolist()
    plain = {key: part.bytes.tolist() for key, part in (reply.items() if isinstance(reply, dict) else enumerate(reply))}
    return [plain, [part["values"].tolist() for part in (reply.values() if isinstance(reply, dict) else reply)]]


def exchange(network: HorovodNetwork, kind: Any) -> list[list[Any]]:
    """Three rounds under one name, as in three steps: what came, and what the simulator says should come."""
    rounds = []
    for turn in range(3):
        came = readable(network.start(kind(me, turn), kind.__name__)())
        board = Board(size)
        posted = [board.post("", rank, kind(rank, turn)) for rank in range(size)]
        rounds.append([came, [readable(posted[rank].reply(rank)) for rank in range(size)][me]])
    return rounds


def unheard(network: HorovodNetwork) -> str:
    """Rank 0 waits for 1, which has nothing to say; 2 hears itself."""
    own = Send({2: payload(2, 0)} if me == 2 else {}, [[1], [], [2]][me], FORM, DEVICE)
    return training.refused(lambda: network.start(own, "unheard")())


if pair.included():  # rank 1 has no part in this, and does not know of it
    for route in (training.STOCK, *training.ROUTES):
        for spec in ("topk:ratio=1,wire=exact", "topk:ratio=0.01", "dense"):
            found["members", route, spec] = trained(route, spec, "members", pair)
for route in training.ROUTES:  # an optimizer of all ranks after one of some
    found["all", route] = trained(route, "topk:ratio=0.01", "all", hvd.global_process_set)
for route in training.ROUTES:  # every rank makes the optimizer; it works in the set alone, elsewhere each trains by itself
    found["everywhere", route] = trained(route, "topk:ratio=0.01", "everywhere", pair)
network = HorovodNetwork(hvd.global_process_set)
network.prefix = "test"
for kind in (swap, spread, ring, collect, everybody, nobody, gather, total, mean):
    found["exchange", kind.__name__] = exchange(network, kind)
found["unheard"] = unheard(network)
ranks.report(found)
hvd.barrier()
