"""The formula of traffic: against gloo's own loops, and every compressor and form against its own sum."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from reference import compact_bytes

import gradcomp
from gradcomp.core.requests import Gather, Reduce, Send, World
from gradcomp.messages.payload import wrap
from gradcomp.native.extension import MOMENTS
from laboratory.traffic import formula

ROOT = Path(__file__).resolve().parents[2]

N = 4096
MODEL = {"w": (64, 64)}
WORLDS = [1, 2, 3, 4, 6, 8, 64, 1024]


class Own(NamedTuple):
    """What a rank sends in a step: operations by kind, messages, bytes."""

    operations: Counter[str]
    messages: int
    bytes: int


# The messages of a rank, as a function of the rank and the number of ranks.
Way = Callable[[int, int], Own]


def gather(size: int) -> Way:
    return lambda rank, ranks: Own(Counter(Gather=1), ranks - 1, (ranks - 1) * size)


def reduce(size: int) -> Way:
    return lambda rank, ranks: Own(Counter(Reduce=1), *gloo_ring(size, rank, ranks))


def send(size: Callable[[int, int], int], rounds: Callable[[int], int]) -> Way:
    """Count an alltoall and its lengths: two messages to each of the others, in every round."""
    return lambda rank, ranks: Own(Counter(Send=rounds(ranks)), rounds(ranks) * 2 * (ranks - 1), size(rank, ranks))


def tree(size: int) -> Way:
    """Count a tree: one payload up, except from the root, and one down to each child; a level has a round up and one down."""

    def sent(rank: int, ranks: int) -> int:
        return ((rank > 0) + sum(rank % (2 << i) == 0 and rank + (1 << i) < ranks for i in range(10))) * size

    return send(sent, lambda ranks: 2 * max(1, math.ceil(math.log2(ranks))))


def split(k: int) -> Way:
    """Count a payload for each of the others and one to all; an allgather if a part may have less than a line of 64 entries."""

    def own(rank: int, ranks: int) -> Own:
        certain = N // (64 * ranks) * 64
        if not certain:
            return gather(compact_bytes(N, k))(rank, ranks)
        capacity = min(certain, k, math.ceil(1.1 * k / ranks + 3 * math.sqrt(k / ranks)))
        size = compact_bytes(64 * math.ceil(N / (64 * ranks)), capacity)
        return Own(Counter(Send=1, Gather=1), 3 * (ranks - 1), 2 * (ranks - 1) * size)

    return own


def shards(groups: int, size: Callable[[int], int]) -> Way:
    """Count the longest part's payload to each of the others, and one to all; a gather of all if a rank has no group."""

    def own(rank: int, ranks: int) -> Own:
        each = -(-groups // ranks)
        if (ranks - 1) * each >= groups:
            return gather(size(groups))(rank, ranks)
        return Own(Counter(Send=1, Gather=1), 3 * (ranks - 1), 2 * (ranks - 1) * size(each))

    return own


def server(sizes_up: list[int], sizes_down: list[int]) -> Way:
    """Count a server's messages: rank 0 sends to all others, and they send to it."""
    return send(
        lambda rank, ranks: sum(sizes_up) if rank else (ranks - 1) * sum(sizes_down),
        lambda ranks: len(sizes_up) + len(sizes_down),
    )


@functools.cache
def gloo_ring(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Count messages and bytes by the loops of gloo's allreduce.cc, step by step as they stand there; entries have 4 bytes."""
    if ranks == 1:
        return 0, 0
    most = 1024 * 1024
    count = max((size + most - 1) // most, ranks * 2)
    count = (count + ranks - 1) // ranks * ranks
    each = count // ranks
    segment = ((size + count - 1) // count + 3) // 4 * 4
    lengths = [
        min(segment, size - ((rank + first) * each + i) * segment % (count * segment))
        for first in (1, 0)
        for i in range(count - each)
    ]
    return sum(length > 0 for length in lengths), sum(length for length in lengths if length > 0)


def padded(words: int) -> int:
    return 8 * math.ceil(words / 2)


# A hundredth of the entries, the capacity for a tenth more of them, and four times as many.
K, CAPACITY, CANDIDATES = 41, 46, 164
CELLS = 5 * 192
ANSWER = padded(2 * K + 1)
LAYER = 8 * MOMENTS

# The ways that the bytes of each spec go, one after the other.
WAYS: dict[str, list[Way]] = {
    "dense": [reduce(4 * N)],
    "half:route=allgather": [gather(8 + padded(N // 2))],
    "half:route=alltoall": [shards(64, lambda groups: 8 + 2 * 64 * groups)],
    "lgc": [reduce(4 * N)],  # in its first steps; of the others tests/compressors/lgc/test_lgc.py
    "topk:ratio=0.01": [gather(compact_bytes(N, K))],
    "topk:ratio=0.01,wire=exact": [gather(8 + 2 * padded(K))],
    "topk:ratio=0.01,route=split": [split(K)],
    "topk:ratio=0.01,route=tree": [tree(8 + 2 * padded(K))],
    "topk:ratio=0.01,by_host=true": [  # with a host for each rank: nothing to move, and sends to all in a gather's stead
        send(lambda rank, ranks: (ranks - 1) * (compact_bytes(N, K)), lambda ranks: 3)
    ],
    "sdagc:density=0.01,route=split": [split(CAPACITY)],
    "sdagc:density=0.01,route=tree": [tree(8 + 2 * padded(CAPACITY))],
    "bingrad:group=64,route=allgather": [gather(8 + 8 * 64 + 8 * 64)],
    "orq:group=64,route=allgather": [gather(8 + 12 * 64 + 8 * 2 * 64)],
    "linear:group=64,route=allgather": [gather(8 + 8 * 64 + 8 * 3 * 64)],
    "qsgd:group=64,route=allgather": [gather(8 + 4 * 64 + 8 * 3 * 64)],
    "terngrad:group=64,route=allgather": [gather(8 + 4 * 64 + 8 * 2 * 64)],
    "sign:group=64,route=allgather": [gather(8 + 4 * 64 + 8 * 64)],
    "orq:group=64,route=alltoall": [shards(64, lambda groups: 8 + padded(3 * groups) + 8 * 2 * groups)],
    "sdagc:density=0.01": [gather(compact_bytes(N, CAPACITY))],
    "sdagc:density=0.01,wire=exact": [gather(8 + 2 * padded(CAPACITY))],
    "sdagc:density=0.01,shared=true": [gather(LAYER), gather(compact_bytes(N, CAPACITY))],
    "sdagc:lam=0": [reduce(4 * N)],
    "gtopk:ratio=0.01": [tree(8 + 2 * padded(K))],
    "gs_sgd:ratio=0.01,sum=allreduce": [reduce(4 * (CELLS + 1)), reduce(4 * (CANDIDATES + 1))],
    "gs_sgd:ratio=0.01,sum=tree": [tree(padded(CELLS + 1)), reduce(4 * (CANDIDATES + 1))],
    "sketched_sgd:ratio=0.01": [
        server([padded(CELLS + 1), padded(CANDIDATES + 1)], [padded(CANDIDATES), ANSWER]),
    ],
}


def expected(spec: str, rank: int, ranks: int) -> Own:
    parts = [way(rank, ranks) for way in WAYS[spec]]
    operations = sum((part.operations for part in parts), Counter[str]())
    return Own(operations, sum(part.messages for part in parts), sum(part.bytes for part in parts))


def test_every_compressor_is_counted() -> None:
    assert {spec.partition(":")[0] for spec in WAYS} == set(gradcomp.names())


# Each way once with a thousand ranks: a ring, gathers, a tree, sends to a server.
LARGE = ("dense", "topk:ratio=0.01", "topk:ratio=0.01,route=split", "gtopk:ratio=0.01", "sketched_sgd:ratio=0.01")
CASES = [(spec, ranks) for spec in WAYS for ranks in WORLDS if ranks < 1000 or spec in LARGE]


@pytest.mark.parametrize(("spec", "ranks"), CASES)
def test_every_rank_sends_what_the_formula_says(spec: str, ranks: int) -> None:
    counted = formula.simulate(spec, MODEL, ranks)
    assert len(counted) == ranks
    for rank in range(ranks) if ranks < 100 else (0, 1, 2, 5, 8, 511, 512, 768, 1023):
        own = counted[rank]
        assert Own(own.operations, own.sent.messages, own.sent.bytes) == expected(spec, rank, ranks), f"rank {rank}"


@pytest.mark.parametrize("spec", WAYS)
def test_counting_a_step_cut_short_is_counting_a_step(spec: str) -> None:
    simulation = gradcomp.Simulation(spec, MODEL, 5)
    networks = [formula.Counting(reducer.network) for reducer in simulation._reducers]
    for reducer, network in zip(simulation._reducers, networks, strict=True):
        reducer.network = network
    simulation.step([formula.random(MODEL, rank) for rank in range(5)])
    cut = formula.simulate(spec, MODEL, 5)
    assert [(own.operations, own.sent) for own in networks] == [(own.operations, own.sent) for own in cut]


def test_buckets_that_end_in_different_rounds_are_counted_to_their_ends() -> None:
    counted = formula.simulate("sdagc:density=0.01,shared=true,small=dense", {"w": (64, 64), "bias": (64,)}, 4)
    for rank, own in enumerate(counted):
        assert own.operations == {"Gather": 2, "Reduce": 1}
        assert own.sent.bytes == expected("sdagc:density=0.01,shared=true", rank, 4).bytes + gloo_ring(4 * 64, rank, 4)[1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 64])
@pytest.mark.parametrize("count", [1, 2, 7, 40, 1000, 262_144, 1_000_003, 5_000_000])
def test_a_ring_is_gloos(count: int, ranks: int) -> None:
    sent = [formula.ring(count, 4, World(rank, ranks)) for rank in range(ranks)]
    assert [(own.messages, own.bytes) for own in sent] == [gloo_ring(4 * count, rank, ranks) for rank in range(ranks)]
    assert sum(own.bytes for own in sent) == 2 * (ranks - 1) * 4 * count


def test_a_payload_for_the_rank_itself_is_not_on_the_wire() -> None:
    payload = wrap(torch.zeros(10))
    request = Send({0: payload, 2: payload}, (), payload.form, torch.device("cpu"))
    assert formula.sent(request, World(2, 4)) == formula.Sent(messages=6, bytes=40, lengths=3)
    assert formula.sent(request, World(1, 4)) == formula.Sent(messages=6, bytes=80, lengths=3)
    assert formula.Sent(6, 80, 3).framing == 6 * 144 + 3 * 4


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_hollow_operations_are_as_many_messages(ranks: int) -> None:
    world, payload = World(1, ranks), wrap(torch.zeros(1000))
    requests = [Gather(payload), Reduce(torch.zeros(100_000)), Reduce(torch.zeros(3))]
    for request in (*requests, Send({0: payload}, (), payload.form, torch.device("cpu"))):
        full, hollow = formula.sent(request, world), formula.sent(formula.hollow(request, world), world)
        assert (hollow.messages, hollow.lengths) == (full.messages, full.lengths)
        assert hollow.bytes <= 16 * ranks


def test_a_model_has_its_size() -> None:
    for size in (1000, 1001, 500_000):
        assert sum(math.prod(shape) for shape in formula.model(size).values()) == size
