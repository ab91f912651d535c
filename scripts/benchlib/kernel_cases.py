"""The cases of `bench.py kernels`: every kernel of gradcomp, whole steps of the simulator, and what they are measured against.

Bytes moved are those of the contracts in csrc/ops.inc: 4 an entry for every array read and every array written.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gradcomp
from benchlib.rounds import Case
from gradcomp.compressors.bingrad import BinGrad
from gradcomp.compressors.gs_sgd import GsSgd
from gradcomp.compressors.orq import Orq
from gradcomp.messages.levels import Rounding
from gradcomp.messages.payload import empty
from gradcomp.messages.sparse import COMPACT
from gradcomp.native import kernels
from gradcomp.native.extension import MOMENTS
from gradcomp.native.memory import Memory, Update

COPY, ADD, TORCH_TOPK, TORCH_STEP = "torch copy_", "torch add_", "torch top-k, gather, fill", "torch add_, top-k, gather, fill"
FEEDBACK, SIMULATED = "accumulate, take_topk", "Simulation step, topk"
SDAGC, SDAGC_SIMULATED = "accumulate, moments, take_above", "Simulation step, sdagc"
SKETCH, HEAVIEST = "sketch", "heaviest"
ORQ_3, ORQ_9, BINGRAD_B = "ORQ-3, round and add", "ORQ-9, round and add", "BinGrad-b, round and add"
ROUND_3, ADD_3, ROUND_B = "ORQ-3, round", "ORQ-3, add", "BinGrad-b, round"
TORCH_SKETCH, TORCH_HEAVIEST = "torch sketch: tables of hashes, bincount", "torch heaviest: gather, median, top-k"
RATIO = 0.001
MANY = 8  # ranks whose payloads are added in one call


def layer_sizes(n: int, layers: int) -> list[int]:
    """n entries in layers of nearly the same size."""
    return [n // layers + (i < n % layers) for i in range(layers)]


class Bench:
    """The arrays that the cases share or have for themselves, all of n entries."""

    def __init__(self, n: int, device: torch.device, layers: int = 1):
        self.n, self.device, self.sizes = n, device, layer_sizes(n, layers)
        self.k = max(1, math.ceil(RATIO * n))
        torch.manual_seed(0)
        # Inputs take turns, and together are larger than any cache.
        self.inputs = [torch.randn(n, device=device) for _ in range(self._turns())]
        self.pieces = [list(flat.split(self.sizes)) for flat in self.inputs]
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.memory = Memory()

    def _turns(self) -> int:
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if self.device.type == "cuda" else 2**26
        return max(2, min(64, math.ceil(4 * cache / (4 * self.n))))

    def input(self, i: int) -> Tensor:
        return self.inputs[i % len(self.inputs)]

    def grads(self, i: int) -> list[Tensor]:
        return self.pieces[i % len(self.pieces)]

    def empty(self) -> Tensor:
        return torch.zeros(self.n, device=self.device)

    def payload(self) -> dict[str, Tensor]:
        return {
            "values": torch.zeros(self.k, device=self.device),
            "indices": torch.arange(self.k, dtype=torch.int32, device=self.device),
            "header": torch.tensor([self.k, 0], dtype=torch.int32, device=self.device),
        }

    def cases(self) -> list[Case]:
        return [
            *self.yardsticks(),
            *self.passes(),
            *self.sparse(),
            *self.above(),
            *self.sketches(),
            *self.levels(),
            *self.steps(),
        ]

    def yardsticks(self) -> list[Case]:
        n, target, acc = self.n, self.empty(), self.empty()

        def take(value: Tensor) -> Tensor:
            indices = torch.topk(value.abs(), self.k)[1]
            taken = value[indices]
            value.index_fill_(0, indices, 0)
            return taken

        found = [
            Case(COPY, lambda i: target.copy_(self.input(i)), 8 * n),
            Case(ADD, lambda i: acc.add_(self.input(i)), 12 * n),
            Case(TORCH_TOPK, lambda i: take(target), before=lambda i: target.copy_(self.input(i))),
        ]
        residual = self.empty()
        found.append(Case(TORCH_STEP, lambda i: take(residual.add_(self.input(i)))))
        if self.device.type == "cuda":
            found += self._torch_sketch() + ([self._cupy_topk()] if importlib.util.find_spec("cupy") else [])
        return found

    def _torch_sketch(self) -> list[Case]:
        """A count sketch as one would write it: for each row a table of all entries' columns, and one of their signs."""
        sizes = GsSgd(ratio=RATIO).sizes(self.n)
        columns = sizes.cells // sizes.rows
        places = [torch.randint(columns, (self.n,), device=self.device) for _ in range(sizes.rows)]
        signs = [torch.randint(2, (self.n,), device=self.device, dtype=torch.int8) * 2 - 1 for _ in range(sizes.rows)]
        rows = list(zip(places, signs, strict=True))

        def sketch(i: int) -> Tensor:
            return torch.stack([torch.bincount(to, self.input(i) * sign, minlength=columns) for to, sign in rows])

        table = sketch(0)

        def heaviest(i: int) -> Tensor:
            estimates = torch.stack([row[to] * sign for row, (to, sign) in zip(table, rows, strict=True)]).median(0).values
            return torch.topk(estimates.abs(), self.k)[1]

        return [Case(TORCH_SKETCH, sketch), Case(TORCH_HEAVIEST, heaviest)]

    def _cupy_topk(self) -> Case:
        cupy: Any = importlib.import_module("cupy")
        arrays = [cupy.from_dlpack(flat) for flat in self.inputs]
        return Case(
            "CuPy argpartition of -|x|", lambda i: cupy.argpartition(-cupy.abs(arrays[i % len(arrays)]), self.k)[: self.k]
        )

    def passes(self) -> list[Case]:
        n, flat, value, pushed, velocity, whole, taken, wide = self.n, *(self.empty() for _ in range(7))
        seen = torch.zeros(len(self.sizes), MOMENTS, dtype=torch.float64, device=self.device)
        squares = torch.zeros(len(self.sizes), dtype=torch.float64, device=self.device)
        out = [list(self.empty().split(self.sizes)) for _ in self.inputs]
        return [
            Case("sum_squares", lambda i: kernels.sum_squares(self.grads(i), squares, self.memory), 4 * n),
            Case("flatten", lambda i: kernels.flatten(self.grads(i), flat), 8 * n),
            Case("accumulate", lambda i: kernels.accumulate(self.grads(i), value, None, self.flag), 12 * n),
            Case("accumulate, momentum", lambda i: kernels.accumulate(self.grads(i), pushed, velocity, self.flag, 0.9), 20 * n),
            Case(
                "accumulate, moments",
                lambda i: kernels.accumulate(self.grads(i), wide, None, self.flag, moments=seen, memory=self.memory),
                12 * n,
            ),
            Case("offer_all", lambda i: kernels.offer_all(self.input(i), taken, self.flag), 8 * n),
            Case("settle_all", lambda i: kernels.settle_all(whole, taken), 4 * n),
            Case("spread", lambda i: kernels.spread(self.input(i), out[i % len(out)], 0.5), 8 * n),
        ]

    @property
    def take_reads(self) -> int:
        """Bytes an entry that a take reads: nearly none where peaks tell it where to look."""
        return 4 if kernels.peaks(1, self.device) is None else 0

    def sparse(self) -> list[Case]:
        n, k = self.n, self.k
        value, target, update, own, scattered = self.empty(), self.empty(), self.empty(), self.payload(), self.payload()
        scattered["indices"].copy_(torch.randperm(n, device=self.device)[:k].sort()[0])
        own_entries = scattered["values"], scattered["indices"], scattered["header"]
        failed = torch.full((n,), math.nan, device=self.device)
        plain, pushed, velocity, payload = self.empty(), self.empty(), self.empty(), self.payload()

        peaks, memory = kernels.peaks(n, self.device), self.memory

        def feedback(i: int) -> None:
            kernels.accumulate(self.grads(i), plain, None, self.flag, peaks=peaks)
            kernels.take_topk(plain, k, **payload, flag=self.flag, peaks=peaks, memory=memory)

        def with_momentum(i: int) -> None:
            kernels.accumulate(self.grads(i), pushed, velocity, self.flag, 0.9, peaks=peaks)
            kernels.take_topk(pushed, k, **payload, velocity=velocity, flag=self.flag, peaks=peaks, memory=memory)

        return [
            Case(
                "take_topk",
                lambda i: kernels.take_topk(value, k, **own, memory=memory),
                4 * n,
                before=lambda i: value.copy_(self.input(i)),
            ),
            Case(FEEDBACK, feedback, (12 + self.take_reads) * n),
            Case("accumulate, take_topk, momentum", with_momentum, (20 + self.take_reads) * n),
            Case("add_sparse", lambda i: kernels.add_sparse(target, **scattered, scale=0.5), 16 * k),
            Case("settle_sparse, nothing to do", lambda i: kernels.settle_sparse(target, *own_entries, update=update), 4),
            Case("settle_sparse", lambda i: kernels.settle_sparse(target, *own_entries, update=failed), 16 * k),
        ]

    def above(self) -> list[Case]:
        """Thresholds of 3.3 deviations; what accumulates is sent again and again, so that about 0.1 % travel each time."""
        n, layers = self.n, len(self.sizes)
        ends = torch.tensor(self.sizes).cumsum(0).to(torch.int32).to(self.device)
        centers, thresholds = torch.zeros(layers, device=self.device), torch.zeros(layers, device=self.device)
        moments = torch.zeros(layers, MOMENTS, dtype=torch.float64, device=self.device)
        lam = torch.full((1,), 3.3, device=self.device)
        payload, form = self.payload(), COMPACT.form(n, self.k)
        packed = empty(form, self.device)
        value, pushed, velocity, target = (self.empty() for _ in range(4))
        flag, peaks, memory, chosen = self.flag, kernels.peaks(n, self.device), self.memory, (ends, centers, thresholds)
        values, indices = self.payload()["values"], self.payload()["indices"]
        failed = torch.full((n,), math.nan, device=self.device)

        def take(acc: Tensor, velocity: Tensor | None) -> None:
            kernels.set_thresholds(moments, ends, lam, centers, thresholds)
            kernels.take_above(acc, *chosen, **payload, velocity=velocity, flag=flag, peaks=peaks, memory=memory)

        def plain(i: int) -> None:
            kernels.accumulate(self.grads(i), value, None, flag, moments=moments, peaks=peaks, memory=memory)
            take(value, None)

        def with_momentum(i: int) -> None:
            kernels.accumulate(self.grads(i), pushed, velocity, flag, 0.9, moments=moments, peaks=peaks, memory=memory)
            take(pushed, velocity)

        def pack(i: int) -> None:
            kernels.pack_sparse(**payload, value=target, blocks=packed["blocks"], entries=packed["entries"])

        def only_take(i: int) -> None:
            kernels.take_above(target, *chosen, **payload, flag=flag, memory=memory)

        return [
            Case(SDAGC, plain, (12 + self.take_reads) * n),
            Case(f"{SDAGC}, momentum", with_momentum, (20 + self.take_reads) * n),
            Case("take_above", only_take, 4 * n, before=lambda i: target.copy_(self.input(i))),
            Case("pack_sparse", pack, 20 * self.k),
            Case(
                "unpack_sparse", lambda i: kernels.unpack_sparse(**packed.arrays, values=values, indices=indices), 12 * self.k
            ),
            Case("add_packed", lambda i: COMPACT.add(Update(target), [packed], 0.5), 12 * self.k),
            Case(f"add_packed, {MANY} ranks", lambda i: COMPACT.add(Update(target), [packed] * MANY, 0.5), 12 * MANY * self.k),
            Case(
                "settle_packed", lambda i: kernels.settle_packed(target, **packed.arrays, update=failed, keep=0.0), 12 * self.k
            ),
        ]

    def sketches(self) -> list[Case]:
        """Tables of five rows and five columns for each entry that is to be found. What is counted of the second kernel are the
        cells that it reads: they come from a cache, mostly."""
        sizes = GsSgd(ratio=RATIO).sizes(self.n)
        rows = sizes.rows
        filled, table = (torch.zeros(sizes.cells, device=self.device) for _ in range(2))
        kernels.sketch(self.input(0), rows, 0, filled)
        places = torch.zeros(self.k, dtype=torch.int32, device=self.device)
        estimates = torch.zeros(self.k, device=self.device)
        return [
            Case(SKETCH, lambda i: kernels.sketch(self.input(i), rows, 0, table), 4 * self.n),
            Case(
                HEAVIEST, lambda i: kernels.heaviest(filled, rows, 0, self.n, places, estimates, self.memory), 4 * rows * self.n
            ),
        ]

    def levels(self) -> list[Case]:
        """Levels of groups of 2,048, every entry's code in words, and these decoded and added. Words, 1 to 3.2 bits an entry,
        are not counted."""
        value, target = self.empty(), self.empty()
        failed = torch.full((self.n,), math.nan, device=self.device)
        hows = {ORQ_3: Orq(), ORQ_9: Orq(levels=9), BINGRAD_B: BinGrad()}
        roundings = {name: Rounding(how.rule, self.n) for name, how in hows.items()}
        payloads = {name: empty(rounding.form, self.device) for name, rounding in roundings.items()}
        value.copy_(self.input(0))
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

        def case(called: str, do: Callable[[str, int], None], name: str, moved: int) -> Case:
            return Case(called, partial(do, name), moved * self.n, before=lambda i: value.copy_(self.input(i)))

        return [
            *(case(name, both, name, 20) for name in roundings),
            case(ROUND_3, take, ORQ_3, 12),
            case(ADD_3, add, ORQ_3, 8),
            case(f"{ADD_3}, {MANY} ranks", add_many, ORQ_3, 8),
            case("ORQ-3, settle", settle, ORQ_3, 8),
            case(ROUND_B, take, BINGRAD_B, 12),
        ]

    def steps(self) -> list[Case]:
        """Whole steps; their bytes are the sum over the kernels in them (sparse: 12, the take's, and spread writes 4)."""
        shapes = {f"layer{i}": (size,) for i, size in enumerate(self.sizes)}
        named = [dict(zip(shapes, pieces, strict=True)) for pieces in self.pieces]
        specs: list[tuple[str, str, int | None]] = [
            (SIMULATED, f"topk:ratio={RATIO}", (16 + self.take_reads) * self.n),
            (SDAGC_SIMULATED, "sdagc:small=none", (16 + self.take_reads) * self.n),
            ("Simulation step, dense", "dense", None),
        ]
        found = []
        for name, spec, moved in specs:
            simulation = gradcomp.Simulation(spec, shapes, 1, device=self.device)
            found.append(Case(name, lambda i, s=simulation: s.step([named[i % len(named)]]), moved))  # type: ignore[misc]
        return found
