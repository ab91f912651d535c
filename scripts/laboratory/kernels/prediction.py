"""Predicted times of the cases of `lab kernels` on a GPU, written before anything was measured on one.

A case takes the sum of its kernels' times: no kernel starts before the one in front of it has ended. A kernel takes as long as
its slowest part: bytes of memory at the speed of a copy, bytes of the second cache, or instructions. Each launch adds a little.

Bytes are those of the comments in csrc/cuda. Instructions are counted in the machine code that `lab machine-code` reads, along
the way of a whole, aligned tile: those of a loop's turn, or of code without a loop, over the entries that it handles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from laboratory.kernels import arrays as cases
from laboratory.report.tables import figure, markdown


class Gpu(NamedTuple):
    """A GPU: bytes a second of a copy and of the second cache, instructions a second of all threads, seconds of a launch."""

    name: str
    copy: float
    cache: float
    issued: float
    launch: float


# Copies: 90 % of the data sheet's 4.8 TB/s. Cache: about twice that. 132 multiprocessors that issue for four warps each.
H200 = Gpu("NVIDIA H200", 4.3e12, 8e12, 132 * 4 * 32 * 1.7e9, 2.5e-6)
# The same chip, with memory of 3.35 TB/s by the data sheet (SXM).
H100 = H200._replace(name="NVIDIA H100", copy=3.0e12)


class Kernel(NamedTuple):
    """A kernel's cost of an entry: bytes of memory, instructions, and bytes of the second cache."""

    memory: float
    instructions: float = 0.0
    cache: float = 0.0

    def seconds(self, gpu: Gpu) -> float:
        """Predict the seconds of an entry."""
        return max(self.memory / gpu.copy, self.cache / gpu.cache, self.instructions / gpu.issued)


class Cost(NamedTuple):
    """The cost of a case: its kernels that read or write all entries, and the launches of a call, with those of all others."""

    kernels: tuple[Kernel, ...]
    launches: int = 1

    @property
    def memory(self) -> float:
        """Sum the kernels' bytes of memory."""
        return sum(kernel.memory for kernel in self.kernels)

    def seconds(self, n: int, gpu: Gpu) -> float:
        """Predict the seconds of a call on n entries."""
        return self.launches * gpu.launch + n * sum(kernel.seconds(gpu) for kernel in self.kernels)


# A scattered entry counts 80 bytes: 64 to read and to write the 32 bytes around its place, and 16 for the entry itself.
SCATTERED = Kernel(80 * cases.RATIO)

FLATTEN, SQUARES, SPREAD = Kernel(8, 4), Kernel(4, 17), Kernel(8, 18)
ADD, ADD_MOMENTUM, ADD_ADAM = Kernel(12, 18), Kernel(20, 30), Kernel(29, 100)
MEASURE, MEASURE_MOMENTUM = Kernel(12, 34), Kernel(20, 50)
# take_topk reads all entries twice, take_above once. The bits of an entry are written, and read again.
DIGITS, MARK, LIST = Kernel(4, 6), Kernel(4.13, 8), Kernel(0.13, 1)
TAKE, TAKE_ABOVE = (DIGITS, MARK, LIST), (MARK, LIST)
# Five rows. The columns fill the device with threads a little more than once.
SKETCH = Kernel(8, 84, 20)
# Two reads of five cells of the table for each entry.
ESTIMATES = (Kernel(0, 100, 20), Kernel(0.13, 105, 20), LIST)
# A look takes 4 instructions an entry where it counts, 11 where it adds up worths, and 16 where it sums up: a conversion to
# double takes the time of eight. Of normal entries, ORQ-3 counts twice and adds up worths once, ORQ-5 7 and 4 times, ORQ-9 11
# and 7 times; BinGrad-b counts and sums up once each. Smallest and largest take 5, what is around a look 1.
FIND_3, FIND_5, FIND_9, FIND_MEANS = Kernel(4, 25), Kernel(4, 78), Kernel(4, 127), Kernel(4, 31)
ROUND_3, ROUND_5, ROUND_9, ROUND_MEANS = Kernel(8, 41), Kernel(8, 48), Kernel(8, 55), Kernel(8, 17)
ADD_3, ADD_5, ADD_9, ADD_2 = Kernel(8, 23), Kernel(8, 24), Kernel(8, 24), Kernel(8, 20)
ADD_3_MANY = Kernel(8 + cases.MANY / 5, 11 + 12 * cases.MANY)

COSTS = {
    cases.COPY: Cost((Kernel(8),)),
    cases.ADD: Cost((Kernel(12),)),
    "sum_squares": Cost((SQUARES,), 2),
    "flatten": Cost((FLATTEN,)),
    "accumulate": Cost((ADD,)),
    "accumulate, momentum": Cost((ADD_MOMENTUM,)),
    "accumulate, Adam": Cost((ADD_ADAM,)),
    "accumulate, moments": Cost((MEASURE,), 2),
    "offer_all": Cost((Kernel(8),)),
    "settle_all": Cost((Kernel(4),)),
    "spread": Cost((SPREAD,)),
    "take_topk": Cost(TAKE, 8),
    cases.FEEDBACK: Cost((ADD, *TAKE), 9),
    f"{cases.FEEDBACK}, momentum": Cost((ADD_MOMENTUM, *TAKE), 9),
    "add_sparse": Cost((SCATTERED,)),
    "settle_sparse, nothing to do": Cost(()),
    "settle_sparse": Cost((SCATTERED,)),
    cases.SDAGC: Cost((MEASURE, *TAKE_ABOVE), 11),
    f"{cases.SDAGC}, momentum": Cost((MEASURE_MOMENTUM, *TAKE_ABOVE), 11),
    "take_above": Cost(TAKE_ABOVE, 8),
    "pack_sparse": Cost((Kernel(28 * cases.RATIO),), 2),
    "unpack_sparse": Cost((Kernel(10 * cases.RATIO),)),
    "add_packed": Cost((SCATTERED,)),
    f"add_packed, {cases.MANY} ranks": Cost((SCATTERED,) * cases.MANY),
    "settle_packed": Cost((SCATTERED,)),
    cases.SKETCH: Cost((SKETCH,)),
    cases.HEAVIEST: Cost(ESTIMATES, 8),
    cases.ORQ_3: Cost((FIND_3, ROUND_3, ADD_3), 9),
    cases.ORQ_5: Cost((FIND_5, ROUND_5, ADD_5), 9),
    cases.ORQ_9: Cost((FIND_9, ROUND_9, ADD_9), 9),
    cases.BINGRAD_B: Cost((FIND_MEANS, ROUND_MEANS, ADD_2), 6),
    cases.ROUND_3: Cost((FIND_3, ROUND_3), 5),
    cases.ADD_3: Cost((ADD_3,)),
    f"{cases.ADD_3}, {cases.MANY} ranks": Cost((ADD_3_MANY,)),
    "ORQ-3, settle": Cost((ADD_3,)),
    cases.ROUND_B: Cost((FIND_MEANS, ROUND_MEANS), 5),
    cases.SIMULATED: Cost((ADD, *TAKE, Kernel(4)), 13),
    cases.SDAGC_SIMULATED: Cost((MEASURE, *TAKE_ABOVE, Kernel(4)), 15),
    "Simulation step, dense": Cost((ADD, Kernel(8), SPREAD), 5),
}


PAGE = """\
# On a GPU: predicted, and measured

{state} A prediction sums the times of a case's kernels. A kernel takes as long as the slowest of its bytes of memory, bytes
of the second cache, and instructions ([`prediction.py`](../scripts/laboratory/kernels/prediction.py)), on an {gpu.name} that
copies {copy:.2g} TB/s, has a second cache twice as fast, and takes {launch:.1f} us a launch. Bytes and instructions in the
table are an entry's, all kernels together. `results/resources-sm_90.json` has each kernel's registers and memory,
`results/machine-code-sm_90.json` its loads in flight and its loops. `scripts/lab predict` writes this page.

{table}
"""
UNMEASURED_STATE = "**Nothing has been measured on a GPU yet.**"
MEASURED_STATE = "Measured by `scripts/gpu_check` (`results/gpu-*.json`)."


def page(n: int, gpu: Gpu, found: Mapping[str, float]) -> str:
    """Write the page."""
    state = MEASURED_STATE if found else UNMEASURED_STATE
    return PAGE.format(state=state, gpu=gpu, copy=gpu.copy / 1e12, launch=1e6 * gpu.launch, table=table(n, gpu, found))


def table(n: int, gpu: Gpu, measured: Mapping[str, float]) -> str:
    """Write the table in Markdown. measured: milliseconds of cases that a GPU of this kind has run."""
    rows = [[f"on {n / 1e6:g} M entries", "bytes", "instructions", "launches", "predicted ms", "measured ms"]]
    for name, cost in COSTS.items():
        predicted, found = f"{1000 * cost.seconds(n, gpu):.3f}", figure(measured.get(name), "{:.3f}", "not yet")
        instructions = sum(kernel.instructions for kernel in cost.kernels)
        rows.append([name, f"{cost.memory:.3g}", f"{instructions:.3g}", str(cost.launches), predicted, found])
    return markdown(rows)


def measured(results: Sequence[Mapping[str, Any]], n: int, gpu: Gpu) -> dict[str, float]:
    """Pick the milliseconds of this GPU and size from the results of gpu_check."""
    stages = [stage for result in results if gpu.name in result["device"]["name"] for stage in result["stages"]]
    figures = [s["figures"] for s in stages if s["name"] == "kernels" and s["status"] == "ok"]
    return {line["name"]: line["ms"]["median"] for each in figures if each["settings"]["size"] == n for line in each["lines"]}
