"""The cases of `lab kernels`: every kernel of gradcomp, whole steps of the simulator, and their yardsticks.

Bytes follow the contracts in csrc/ops.inc: 4 an entry for every array read and every array written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import gradcomp
from gradcomp.compressors.bingrad import BinGrad
from gradcomp.compressors.gs_sgd import GsSgd
from gradcomp.compressors.orq import Orq
from gradcomp.messages.levels import LevelRounding
from gradcomp.messages.payload import empty
from gradcomp.messages.sparse import COMPACT
from gradcomp.native import kernels
from gradcomp.native.extension import MOMENTS
from gradcomp.native.memory import Update
from laboratory.kernels.arrays import (
    ADD_3,
    BINGRAD_B,
    FEEDBACK,
    HEAVIEST,
    MANY,
    ORQ_3,
    ORQ_5,
    ORQ_9,
    RATIO,
    ROUND_3,
    ROUND_B,
    SDAGC,
    SDAGC_SIMULATED,
    SIMULATED,
    SKETCH,
    TAKE_TOPK,
    Arrays,
)
from laboratory.kernels.yardsticks import yardsticks
from laboratory.timing import Case


def cases(arrays: Arrays) -> list[Case]:
    """Return all cases, the yardsticks first."""
    parts = (yardsticks, passes, sparse, above, sketches, levels, steps)
    return [case for part in parts for case in part(arrays)]


def passes(arrays: Arrays) -> list[Case]:
    """Return the kernels that pass over all entries."""
    n, flat, value, pushed, velocity, whole, taken, wide = arrays.n, *(arrays.zeros() for _ in range(7))
    moved, first, second = (arrays.zeros() for _ in range(3))
    sent_in = torch.zeros(n, dtype=torch.uint8, device=arrays.device)
    adam = kernels.Adaptive(second, 0.1, 0.0, 1.0, 0.999, 0.001, 1.0, 1e-8, 1.0)
    mask = kernels.Mask(None, sent_in, 1)
    seen = torch.zeros(len(arrays.sizes), MOMENTS, dtype=torch.float64, device=arrays.device)
    squares = torch.zeros(len(arrays.sizes), dtype=torch.float64, device=arrays.device)
    out = [list(arrays.zeros().split(arrays.sizes)) for _ in arrays.inputs]
    return [
        Case("sum_squares", lambda i: kernels.sum_squares(arrays.grads(i), squares, arrays.memory), 4 * n),
        Case("flatten", lambda i: kernels.flatten(arrays.grads(i), flat), 8 * n),
        Case("accumulate", lambda i: kernels.accumulate(arrays.grads(i), value, None, arrays.flag), 12 * n),
        Case("accumulate, momentum", lambda i: kernels.accumulate(arrays.grads(i), pushed, velocity, arrays.flag, 0.9), 20 * n),
        Case(
            "accumulate, Adam",
            lambda i: kernels.accumulate(arrays.grads(i), moved, first, arrays.flag, 0.9, adaptive=adam, mask=mask),
            29 * n,
        ),
        Case(
            "accumulate, moments",
            lambda i: kernels.accumulate(arrays.grads(i), wide, None, arrays.flag, moments=seen, memory=arrays.memory),
            12 * n,
        ),
        Case("offer_all", lambda i: kernels.offer_all(arrays.input(i), taken, arrays.flag), 8 * n),
        Case("settle_all", lambda i: kernels.settle_all(whole, taken), 4 * n),
        Case("spread", lambda i: kernels.spread(arrays.input(i), out[i % len(out)], 0.5), 8 * n),
    ]


def take_reads(arrays: Arrays) -> int:
    """Return the bytes an entry that a take reads: nearly none where peaks show it the lines."""
    return 4 if kernels.peaks(1, arrays.device) is None else 0


def sparse(arrays: Arrays) -> list[Case]:
    """Return the kernels around top-k."""
    n, k = arrays.n, arrays.k
    value, target, update, own, scattered = arrays.zeros(), arrays.zeros(), arrays.zeros(), arrays.payload(), arrays.payload()
    scattered["indices"].copy_(torch.randperm(n, device=arrays.device)[:k].sort()[0])
    own_entries = scattered["values"], scattered["indices"], scattered["header"]
    failed = torch.full((n,), math.nan, device=arrays.device)
    plain, pushed, velocity, payload = arrays.zeros(), arrays.zeros(), arrays.zeros(), arrays.payload()

    peaks, memory = kernels.peaks(n, arrays.device), arrays.memory
    sent_in = torch.zeros(n, dtype=torch.uint8, device=arrays.device)

    def feedback(i: int) -> None:
        kernels.accumulate(arrays.grads(i), plain, None, arrays.flag, peaks=peaks)
        kernels.take_topk(plain, k, **payload, flag=arrays.flag, peaks=peaks, memory=memory)

    def with_momentum(i: int) -> None:
        kernels.accumulate(arrays.grads(i), pushed, velocity, arrays.flag, 0.9, peaks=peaks)
        kernels.take_topk(
            pushed, k, **payload, mask=kernels.Mask(velocity, sent_in, i), flag=arrays.flag, peaks=peaks, memory=memory
        )

    return [
        Case(
            TAKE_TOPK,
            lambda i: kernels.take_topk(value, k, **own, memory=memory),
            4 * n,
            before=lambda i: value.copy_(arrays.input(i)),
        ),
        Case(FEEDBACK, feedback, (12 + take_reads(arrays)) * n),
        Case("accumulate, take_topk, momentum", with_momentum, (20 + take_reads(arrays)) * n),
        Case("add_sparse", lambda i: kernels.add_sparse(target, **scattered, scale=0.5), 16 * k),
        Case("settle_sparse, nothing to do", lambda i: kernels.settle_sparse(target, *own_entries, update=update), 4),
        Case("settle_sparse", lambda i: kernels.settle_sparse(target, *own_entries, update=failed), 16 * k),
    ]


def above(arrays: Arrays) -> list[Case]:
    """Return the kernels around thresholds of 3.3 deviations. About 0.1 % of what accumulates is taken in each call."""
    n, layers = arrays.n, len(arrays.sizes)
    ends = torch.tensor(arrays.sizes).cumsum(0).to(torch.int32).to(arrays.device)
    thresholds = torch.zeros(layers, device=arrays.device)
    moments = torch.zeros(layers, MOMENTS, dtype=torch.float64, device=arrays.device)
    lam = torch.tensor([3.3, 0.1], device=arrays.device)
    payload, form = arrays.payload(), COMPACT.form(n, arrays.k)
    packed, entries = empty(form, arrays.device), arrays.payload()
    kernels.take_topk(arrays.input(0).clone(), arrays.k, **entries, memory=arrays.memory)
    packed["header"].copy_(entries["header"])
    value, pushed, velocity, target = (arrays.zeros() for _ in range(4))
    flag, peaks, memory, chosen = arrays.flag, kernels.peaks(n, arrays.device), arrays.memory, (ends, thresholds)
    failed = torch.full((n,), math.nan, device=arrays.device)

    sent_in = torch.zeros(n, dtype=torch.uint8, device=arrays.device)

    def take(acc: Tensor, mask: kernels.Mask | None) -> None:
        kernels.set_thresholds(moments, ends, lam, thresholds)
        kernels.take_above(acc, *chosen, **payload, mask=mask, flag=flag, peaks=peaks, memory=memory)

    def plain(i: int) -> None:
        kernels.accumulate(arrays.grads(i), value, None, flag, moments=moments, peaks=peaks, memory=memory)
        take(value, None)

    def with_momentum(i: int) -> None:
        kernels.accumulate(arrays.grads(i), pushed, velocity, flag, 0.9, moments=moments, peaks=peaks, memory=memory)
        take(pushed, kernels.Mask(velocity, sent_in, i))

    def pack(i: int) -> None:
        COMPACT.write(packed, entries["values"], entries["indices"], target)

    def only_take(i: int) -> None:
        kernels.take_above(target, *chosen, **payload, flag=flag, memory=memory)

    pack(0)
    return [
        Case(SDAGC, plain, (12 + take_reads(arrays)) * n),
        Case(f"{SDAGC}, momentum", with_momentum, (20 + take_reads(arrays)) * n),
        Case("take_above", only_take, 4 * n, before=lambda i: target.copy_(arrays.input(i))),
        Case("pack_sparse", pack, 20 * arrays.k),
        Case("unpack_sparse", lambda i: COMPACT.read(packed), 10 * arrays.k),
        Case("add_packed", lambda i: COMPACT.add(Update(target), [packed], 0.5), 10 * arrays.k),
        Case(f"add_packed, {MANY} ranks", lambda i: COMPACT.add(Update(target), [packed] * MANY, 0.5), 10 * MANY * arrays.k),
        Case("settle_packed", lambda i: COMPACT.settle(target, packed, Update(failed)), 10 * arrays.k),
    ]


def sketches(arrays: Arrays) -> list[Case]:
    """Return the kernels of sketches with five rows, and five columns for each wanted entry.

    The bytes of the second kernel are the cells that it reads, mostly from a cache.
    """
    sizes = GsSgd(ratio=RATIO).sizes(arrays.n)
    rows = sizes.rows
    filled, table = (torch.zeros(sizes.cells, device=arrays.device) for _ in range(2))
    kernels.sketch(arrays.input(0), rows, 0, filled)
    places = torch.zeros(arrays.k, dtype=torch.int32, device=arrays.device)
    estimates = torch.zeros(arrays.k, device=arrays.device)
    return [
        Case(SKETCH, lambda i: kernels.sketch(arrays.input(i), rows, 0, table), 4 * arrays.n),
        Case(
            HEAVIEST,
            lambda i: kernels.heaviest(filled, rows, 0, arrays.n, places, estimates, arrays.memory),
            4 * rows * arrays.n,
        ),
    ]


def levels(arrays: Arrays) -> list[Case]:
    """Return the kernels of levels, in groups of 2,048. Their bytes leave out the words, 1 to 3.2 bits an entry."""
    value, target = arrays.zeros(), arrays.zeros()
    failed = torch.full((arrays.n,), math.nan, device=arrays.device)
    compressors = {ORQ_3: Orq(), ORQ_5: Orq(levels=5), ORQ_9: Orq(levels=9), BINGRAD_B: BinGrad()}
    roundings = {name: LevelRounding(own.rule, arrays.n) for name, own in compressors.items()}
    payloads = {name: empty(rounding.form, arrays.device) for name, rounding in roundings.items()}
    value.copy_(arrays.input(0))
    many = [roundings[ORQ_3].take(value.clone(), None, None, rank) for rank in range(MANY)]

    def take(name: str, i: int) -> None:
        roundings[name].take(value, None, None, i, payloads[name])

    def add(name: str, i: int) -> None:
        roundings[name].add(target, [payloads[name]], 0.5)

    def add_many(name: str, i: int) -> None:
        roundings[name].add(target, many, 0.5)

    def settle(name: str, i: int) -> None:
        roundings[name].settle(value, payloads[name], failed)

    def both(name: str, i: int) -> None:
        take(name, i)
        add(name, i)

    def case(title: str, do: Callable[[str, int], None], name: str, moved: int) -> Case:
        return Case(title, partial(do, name), moved * arrays.n, before=lambda i: value.copy_(arrays.input(i)))

    return [
        *(case(name, both, name, 20) for name in roundings),
        case(ROUND_3, take, ORQ_3, 12),
        case(ADD_3, add, ORQ_3, 8),
        case(f"{ADD_3}, {MANY} ranks", add_many, ORQ_3, 8),
        case("ORQ-3, settle", settle, ORQ_3, 8),
        case(ROUND_B, take, BINGRAD_B, 12),
    ]


def steps(arrays: Arrays) -> list[Case]:
    """Return whole steps. Their bytes are the sum over their kernels (sparse: 12, the take's, and 4 that spread writes)."""
    shapes = {f"layer{i}": (size,) for i, size in enumerate(arrays.sizes)}
    named = [dict(zip(shapes, pieces, strict=True)) for pieces in arrays.pieces]
    specs: list[tuple[str, str, int | None]] = [
        (SIMULATED, f"topk:ratio={RATIO}", (16 + take_reads(arrays)) * arrays.n),
        (SDAGC_SIMULATED, f"sdagc:small=none,density={RATIO}", (16 + take_reads(arrays)) * arrays.n),
        ("Simulation step, dense", "dense", None),
    ]
    found = []
    for name, spec, moved in specs:
        simulation = gradcomp.Simulation(spec, shapes, 1, device=arrays.device)
        found.append(Case(name, lambda i, s=simulation: s.step([named[i % len(named)]]), moved))  # type: ignore[misc]
    return found
