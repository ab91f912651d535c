"""The cases of `lab kernels`: every kernel of gradcomp, whole steps of the simulator, and the same work in plain torch.

Bytes follow the contracts in csrc/ops.inc: 4 an entry for every array read and every array written.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gradcomp
from gradcomp.compressors.bingrad import BinGrad
from gradcomp.compressors.blocks import Blocks
from gradcomp.compressors.gs_sgd import GsSgd
from gradcomp.compressors.orq import Orq
from gradcomp.messages.payload import empty
from gradcomp.messages.rounding import LevelRounding
from gradcomp.messages.sparse import COMPACT
from gradcomp.native import kernels
from gradcomp.native.extension import MOMENTS
from gradcomp.native.memory import Memory, Update
from laboratory import options
from laboratory.timing import Case

COPY, ADD, TORCH_TOPK, TORCH_STEP = "torch copy_", "torch add_", "torch top-k of |x|", "torch add_, top-k, gather, fill"
TAKE_TOPK, FEEDBACK, SIMULATED = "take_topk", "collect, take_topk", "Simulation step, topk"
SDAGC, SDAGC_SIMULATED = "collect, moments, take_above", "Simulation step, sdagc"
SKETCH, HEAVIEST = "sketch", "heaviest"
ORQ_3, ORQ_5, ORQ_9 = (f"ORQ-{levels}, round and add" for levels in (3, 5, 9))
BINGRAD_B = "BinGrad-b, round and add"
BLOCKS, ROUND_BLOCKS, ADD_BLOCKS = "blocks, round and add", "blocks, round", "blocks, add"
BLOCKS_SIMULATED = "Simulation step, blocks"
ROUND_3, ADD_3, ROUND_B = "ORQ-3, round", "ORQ-3, add", "BinGrad-b, round"

# The share of the entries that sparse cases take.
RATIO = 0.001

# Ranks of the payloads that are added in one call.
MANY = 8


class Arrays:
    """Arrays of n entries. Cases share the inputs, which take turns, and make arrays of their own."""

    def __init__(self, n: int, device: torch.device, layers: int = 1):
        self.n, self.device, self.sizes = n, device, [n // layers + (i < n % layers) for i in range(layers)]
        self.k = max(1, math.ceil(RATIO * n))
        torch.manual_seed(0)
        # Together they are larger than any cache.
        self.inputs = [torch.randn(n, device=device) for _ in range(self._turns())]
        self.pieces = [list(flat.split(self.sizes)) for flat in self.inputs]
        self.flag, self.memory = self.zeros(1, torch.int32), Memory()

    def _turns(self) -> int:
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if self.device.type == "cuda" else 2**26
        return max(2, min(64, math.ceil(4 * cache / (4 * self.n))))

    def input(self, i: int) -> Tensor:
        """Return the i-th call's input."""
        return self.inputs[i % len(self.inputs)]

    def grads(self, i: int) -> list[Tensor]:
        """Return the i-th call's input, cut into layers."""
        return self.pieces[i % len(self.pieces)]

    def zeros(self, count: int | None = None, kind: torch.dtype = torch.float32) -> Tensor:
        """Make an array of zeros, as long as the inputs unless a count is given."""
        return torch.zeros(self.n if count is None else count, dtype=kind, device=self.device)

    def failed(self) -> Tensor:
        """Make an update that a non-finite entry spoiled."""
        return torch.full((self.n,), math.nan, device=self.device)

    def moments(self) -> Tensor:
        """Make the arrays into which collect measures each layer."""
        return self.zeros(len(self.sizes) * MOMENTS, torch.float64).view(-1, MOMENTS)

    def payload(self) -> dict[str, Any]:
        """Make arrays for k sparse entries."""
        return {
            "values": self.zeros(self.k),
            "indices": torch.arange(self.k, dtype=torch.int32, device=self.device),
            "header": torch.tensor([self.k, 0], dtype=torch.int32, device=self.device),
        }


def cases(arrays: Arrays) -> list[Case]:
    """Return all cases, the yardsticks first."""
    parts = (yardsticks, passes, sparse, above, sketches, levels, blocks, steps)
    return [case for part in parts for case in part(arrays)]


def passes(arrays: Arrays) -> list[Case]:
    """Return the kernels that pass over all entries."""
    n, flag, grads, zeros = arrays.n, arrays.flag, arrays.grads, arrays.zeros
    flat, value, whole, taken, wide = (zeros() for _ in range(5))
    moments, squares = arrays.moments(), zeros(len(arrays.sizes), torch.float64)
    out = [list(zeros().split(arrays.sizes)) for _ in arrays.inputs]
    collect = kernels.collect

    def with_moments(i: int) -> None:
        collect(grads(i), wide, flag, moments=moments, memory=arrays.memory)

    return [
        Case("sum_squares", lambda i: kernels.sum_squares(grads(i), squares, arrays.memory), 4 * n),
        Case("flatten", lambda i: kernels.flatten(grads(i), flat), 8 * n),
        Case("collect", lambda i: collect(grads(i), value, flag), 8 * n),
        Case("collect, moments", with_moments, 8 * n),
        Case("offer_all", lambda i: kernels.offer_all(arrays.input(i), taken, flag), 8 * n),
        Case("settle_all", lambda i: kernels.settle_all(whole, taken), 4 * n),
        Case("spread", lambda i: kernels.spread(arrays.input(i), out[i % len(out)], 0.5), 8 * n),
    ]


def sparse(arrays: Arrays) -> list[Case]:
    """Return the kernels around top-k."""
    n, k, flag, memory = arrays.n, arrays.k, arrays.flag, arrays.memory
    value, target, update, plain = (arrays.zeros() for _ in range(4))
    taken, scattered, payload = (arrays.payload() for _ in range(3))
    scattered["indices"].copy_(torch.randperm(n, device=arrays.device)[:k].sort()[0])
    entries, failed = (scattered["values"], scattered["indices"], scattered["header"]), arrays.failed()

    def feedback(i: int) -> None:
        kernels.collect(arrays.grads(i), plain, flag)
        kernels.take_topk(plain, k, **payload, flag=flag, memory=memory)

    def only_take(i: int) -> None:
        kernels.take_topk(value, k, **taken, memory=memory)

    return [
        Case(TAKE_TOPK, only_take, 4 * n, before=lambda i: value.copy_(arrays.input(i))),
        Case(FEEDBACK, feedback, 12 * n),
        Case("add_sparse", lambda i: kernels.add_sparse(target, **scattered, scale=0.5), 16 * k),
        Case("settle_sparse, nothing to do", lambda i: kernels.settle_sparse(target, *entries, update=update), 4),
        Case("settle_sparse", lambda i: kernels.settle_sparse(target, *entries, update=failed), 16 * k),
    ]


def above(arrays: Arrays) -> list[Case]:
    """Return the kernels around thresholds of 3.3 deviations. A call takes about 0.1 % of the entries."""
    n, flag, memory = arrays.n, arrays.flag, arrays.memory
    ends = torch.tensor(arrays.sizes).cumsum(0).to(torch.int32).to(arrays.device)
    moments, thresholds, lam = arrays.moments(), arrays.zeros(len(arrays.sizes)), torch.tensor([3.3, 0.1], device=arrays.device)
    packed, payload, entries = empty(COMPACT.form(n, arrays.k), arrays.device), arrays.payload(), arrays.payload()
    kernels.take_topk(arrays.input(0).clone(), arrays.k, **entries, memory=memory)
    packed["header"].copy_(entries["header"])
    value, target, failed = arrays.zeros(), arrays.zeros(), arrays.failed()
    chosen = ends, thresholds

    def feedback(i: int) -> None:
        kernels.collect(arrays.grads(i), value, flag, moments=moments, memory=memory)
        kernels.set_thresholds(moments, ends, lam, thresholds)
        kernels.take_above(value, *chosen, **payload, flag=flag, memory=memory)

    def pack(i: int) -> None:
        COMPACT.write(packed, entries["values"], entries["indices"], target)

    def only_take(i: int) -> None:
        kernels.take_above(target, *chosen, **payload, flag=flag, memory=memory)

    pack(0)
    return [
        Case(SDAGC, feedback, 12 * n),
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
    filled, table, estimates = arrays.zeros(sizes.cells), arrays.zeros(sizes.cells), arrays.zeros(arrays.k)
    kernels.sketch(arrays.input(0), rows, 0, filled)
    places = arrays.zeros(arrays.k, torch.int32)

    def heaviest(i: int) -> None:
        kernels.heaviest(filled, rows, 0, arrays.n, places, estimates, arrays.memory)

    return [
        Case(SKETCH, lambda i: kernels.sketch(arrays.input(i), rows, 0, table), 4 * arrays.n),
        Case(HEAVIEST, heaviest, 4 * rows * arrays.n),
    ]


class Rounding:
    """The calls of one way to round all entries, for cases: what they take and give back are arrays of its own."""

    def __init__(self, arrays: Arrays, rounding: Any):
        self._rounding, self._arrays = rounding, arrays
        self._value, self._target, self._failed = arrays.zeros(), arrays.zeros(), arrays.failed()
        self._many = [rounding.take(arrays.input(0).clone(), None, None, rank) for rank in range(MANY)]

    def take(self, i: int) -> None:
        self._rounding.take(self._value, None, None, i, self._many[0])

    def add(self, i: int) -> None:
        self._rounding.add(self._target, self._many[:1], 0.5)

    def add_many(self, i: int) -> None:
        self._rounding.add(self._target, self._many, 0.5)

    def settle(self, i: int) -> None:
        self._rounding.settle(self._value, self._many[0], self._failed)

    def both(self, i: int) -> None:
        self.take(i)
        self.add(i)

    def case(self, title: str, call: Callable[[int], None], moved: int) -> Case:
        """Make a case of a call that moves so many bytes an entry."""
        before = lambda i: self._value.copy_(self._arrays.input(i))  # noqa: E731
        return Case(title, call, moved * self._arrays.n, before=before)


def levels(arrays: Arrays) -> list[Case]:
    """Return the kernels of levels, in groups of 2,048. Their bytes leave out the words, 1 to 3.2 bits an entry."""
    compressors = {ORQ_3: Orq(), ORQ_5: Orq(levels=5), ORQ_9: Orq(levels=9), BINGRAD_B: BinGrad()}
    own = {name: Rounding(arrays, LevelRounding(compressor.rule, arrays.n)) for name, compressor in compressors.items()}
    three, two = own[ORQ_3], own[BINGRAD_B]
    return [
        *(each.case(name, each.both, 20) for name, each in own.items()),
        three.case(ROUND_3, three.take, 12),
        three.case(ADD_3, three.add, 8),
        three.case(f"{ADD_3}, {MANY} ranks", three.add_many, 8),
        three.case("ORQ-3, settle", three.settle, 8),
        two.case(ROUND_B, two.take, 12),
    ]


def blocks(arrays: Arrays) -> list[Case]:
    """Return the kernels of blocks. Their bytes leave out the words, 5.3 bits an entry."""
    own = Rounding(arrays, Blocks().rounding(arrays.n))
    return [
        own.case(BLOCKS, own.both, 16),
        own.case(ROUND_BLOCKS, own.take, 8),
        own.case(ADD_BLOCKS, own.add, 8),
        own.case(f"{ADD_BLOCKS}, {MANY} ranks", own.add_many, 8),
        own.case("blocks, settle", own.settle, 8),
    ]


def steps(arrays: Arrays) -> list[Case]:
    """Return whole steps. Their bytes are sums over kernels: sparse, 8 of flatten, 24 of the offer, the take's, 4 of spread."""
    shapes = {f"layer{i}": (size,) for i, size in enumerate(arrays.sizes)}
    named = [dict(zip(shapes, pieces, strict=True)) for pieces in arrays.pieces]
    specs: list[tuple[str, str, int | None]] = [
        (SIMULATED, f"topk:ratio={RATIO}", 40 * arrays.n),
        (SDAGC_SIMULATED, f"sdagc:small=none,density={RATIO}", 40 * arrays.n),
        (BLOCKS_SIMULATED, "blocks", None),
        ("Simulation step, dense", "dense", None),
    ]
    cases = []
    for name, spec, moved in specs:
        simulation = gradcomp.Simulation(spec, shapes, 1, device=arrays.device)
        cases.append(Case(name, lambda i, s=simulation: s.step([named[i % len(named)]]), moved))  # type: ignore[misc]
    return cases


def yardsticks(arrays: Arrays) -> list[Case]:
    """Return copies, sums and top-k of plain torch."""
    n, target, acc, residual = arrays.n, arrays.zeros(), arrays.zeros(), arrays.zeros()

    def take(value: Tensor) -> Tensor:
        indices = torch.topk(value.abs(), arrays.k)[1]
        taken = value[indices]
        value.index_fill_(0, indices, 0)
        return taken

    return [
        Case(COPY, lambda i: target.copy_(arrays.input(i)), 8 * n),
        Case(ADD, lambda i: acc.add_(arrays.input(i)), 12 * n),
        Case(TORCH_TOPK, lambda i: torch.topk(arrays.input(i).abs(), arrays.k)),
        Case(TORCH_STEP, lambda i: take(residual.add_(arrays.input(i)))),
    ]


# The parts whose kernels ncu counts. Calls before the one that counts load machine code, and fill residuals.
PARTS, WARM = {part.__name__: part for part in (passes, sparse, above, sketches, levels)}, 2


def main() -> None:
    """Run each case of a part once between marks for ncu, and print their names."""
    parser = argparse.ArgumentParser(prog="python -m laboratory.kernel_cases", description=main.__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--size", type=options.size, required=True)
    chosen = parser.parse_args()
    on_gpu = chosen.device == "cuda"
    names = []
    for case in PARTS[chosen.part](Arrays(chosen.size, torch.device(chosen.device))):
        print(case.name, flush=True)
        for i in range(WARM + 1):
            case.before(i)
            if on_gpu and i == WARM:
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
            case.call(i)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        names.append(case.name)
    print("@" + json.dumps({"size": chosen.size, "cases": names}), flush=True)


if __name__ == "__main__":
    main()
