"""What every case of `bench.py kernels` should take on a GPU, from what it moves and computes, written before it was measured.

A case takes what its slowest part does: bytes from memory at the speed of a copy, bytes from the second cache, or instructions;
and beside it a little for each launch. The counts are those of the comments in csrc/cuda, an entry and all passes together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchlib import kernel_cases as cases


class Gpu(NamedTuple):
    """A second: bytes that a copy reads and writes, that the second cache gives, instructions of threads; seconds a launch."""

    name: str
    copy: float
    cache: float
    issued: float
    launch: float


H200 = Gpu("NVIDIA H200", 4.3e12, 8e12, 132 * 4 * 32 * 1.7e9, 2.5e-6)
"""Copies: 90 % of the 4.8 TB/s of its data sheet. Cache: about twice that. 132 multiprocessors that issue for four warps."""


class Cost(NamedTuple):
    """Of an entry: bytes of memory, bytes of the second cache, instructions; and launches."""

    memory: float
    launches: int = 1
    cache: float = 0.0
    instructions: float = 0.0

    def seconds(self, n: int, gpu: Gpu) -> float:
        return self.launches * gpu.launch + n * max(
            self.memory / gpu.copy, self.cache / gpu.cache, self.instructions / gpu.issued
        )


SCATTERED = 80 * cases.RATIO  # an entry of a few: 8 bytes of its own, and 32 to read and to write around its place
TAKE, TAKE_ABOVE = 8.0, 4.3  # two looks at all entries; one look, and a bit for each

COSTS = {
    cases.COPY: Cost(8),
    cases.ADD: Cost(12),
    "sum_squares": Cost(4, 2),
    "flatten": Cost(8),
    "accumulate": Cost(12),
    "accumulate, momentum": Cost(20),
    "accumulate, moments": Cost(12, 2),
    "offer_all": Cost(8),
    "settle_all": Cost(4),
    "spread": Cost(8),
    "take_topk": Cost(TAKE, 8),
    cases.FEEDBACK: Cost(12 + TAKE, 9),
    f"{cases.FEEDBACK}, momentum": Cost(20 + TAKE, 9),
    "add_sparse": Cost(SCATTERED),
    "settle_sparse, nothing to do": Cost(0),
    "settle_sparse": Cost(SCATTERED),
    cases.SDAGC: Cost(12 + TAKE_ABOVE, 11),
    f"{cases.SDAGC}, momentum": Cost(20 + TAKE_ABOVE, 11),
    "take_above": Cost(TAKE_ABOVE, 8),
    "pack_sparse": Cost(20 * cases.RATIO),
    "unpack_sparse": Cost(12 * cases.RATIO),
    "add_packed": Cost(SCATTERED),
    f"add_packed, {cases.MANY} ranks": Cost(cases.MANY * SCATTERED),
    "settle_packed": Cost(SCATTERED),
    cases.SKETCH: Cost(24, 1, 20, 60),  # five rows; each fills the device with threads a little more than once
    cases.HEAVIEST: Cost(0, 8, 40, 150),  # two looks at five cells of the table for each entry
    cases.ORQ_3: Cost(20, 9, 50, 180),
    cases.ORQ_9: Cost(20, 9, 250, 750),
    cases.BINGRAD_B: Cost(20, 6, 12, 75),
    cases.ROUND_3: Cost(12, 5, 50, 165),  # a dozen looks at each group, which the first cache gives after the first
    cases.ADD_3: Cost(8, 1, 0, 15),
    f"{cases.ADD_3}, {cases.MANY} ranks": Cost(8 + cases.MANY / 5, 1, 0, 15 * cases.MANY),
    "ORQ-3, settle": Cost(8, 1, 0, 15),
    cases.ROUND_B: Cost(12, 5, 12, 60),
    cases.SIMULATED: Cost(16 + TAKE, 13),
    cases.SDAGC_SIMULATED: Cost(16 + TAKE_ABOVE, 15),
    "Simulation step, dense": Cost(28, 5),
}


PAGE = """\
# On a GPU: predicted, and measured

{state} What is predicted follows from what each case moves and computes
([`predict.py`](../scripts/benchlib/predict.py)), for an {gpu.name} that copies {copy:.2g} TB/s, its second cache twice that,
with {launch:.1f} us a launch. Bytes are those of memory, an entry, all passes together. The registers and the memory that each
kernel needs are in `results/resources-sm_90.json`. This page is written by `scripts/bench.py predict`.

{table}
"""
NONE = "**Nothing has been measured on a GPU yet.**"
SOME = "Measured by `scripts/gpu_check` (`results/gpu-*.json`)."


def page(n: int, gpu: Gpu, found: Mapping[str, float]) -> str:
    state = SOME if found else NONE
    return PAGE.format(state=state, gpu=gpu, copy=gpu.copy / 1e12, launch=1e6 * gpu.launch, table=table(n, gpu, found))


def table(n: int, gpu: Gpu, measured: Mapping[str, float]) -> str:
    """In Markdown; measured: milliseconds of cases, where a GPU of this kind has run them."""
    lines = [f"| on {n / 1e6:g} M entries | bytes | launches | predicted ms | measured ms |", "|---|--:|--:|--:|--:|"]
    for name, cost in COSTS.items():
        found = f"{measured[name]:.3f}" if name in measured else "not yet"
        lines.append(f"| {name} | {cost.memory:.3g} | {cost.launches} | {1000 * cost.seconds(n, gpu):.3f} | {found} |")
    return "\n".join(lines)


def measured(results: Sequence[Mapping[str, Any]], n: int, gpu: Gpu) -> dict[str, float]:
    """From the results of gpu_check, those of this GPU and size."""
    stages = [stage for result in results if gpu.name in result["device"]["name"] for stage in result["stages"]]
    figures = [s["figures"] for s in stages if s["name"] == "kernels" and s["status"] == "ok"]
    return {line["name"]: line["ms"]["median"] for each in figures if each["settings"]["size"] == n for line in each["lines"]}
