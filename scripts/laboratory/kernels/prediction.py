"""Predicted times of the cases of `lab kernels` on a GPU, written before anything was measured on one.

A case takes as long as its slowest part: bytes of memory at the speed of a copy, bytes of the second cache, or instructions.
Each launch adds a little. The counts are those of the comments in csrc/cuda, an entry, all passes together.
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


class Cost(NamedTuple):
    """The cost of a case. Of an entry: bytes of memory and of the second cache, and instructions. Of a call: launches."""

    memory: float
    launches: int = 1
    cache: float = 0.0
    instructions: float = 0.0

    def seconds(self, n: int, gpu: Gpu) -> float:
        """Predict the seconds of a call on n entries."""
        return self.launches * gpu.launch + n * max(
            self.memory / gpu.copy, self.cache / gpu.cache, self.instructions / gpu.issued
        )


# Bytes of memory for each entry of the bucket. A scattered entry counts 80: 64 to read and to write the 32 bytes around its
# place, and 16 for the entry itself.
SCATTERED = 80 * cases.RATIO

# Two reads of all entries; one read, and a bit for each.
TAKE, TAKE_ABOVE = 8.0, 4.3

COSTS = {
    cases.COPY: Cost(8),
    cases.ADD: Cost(12),
    "sum_squares": Cost(4, 2),
    "flatten": Cost(8),
    "accumulate": Cost(12),
    "accumulate, momentum": Cost(20),
    "accumulate, Adam": Cost(29),
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
    "pack_sparse": Cost(28 * cases.RATIO, 2),
    "unpack_sparse": Cost(10 * cases.RATIO),
    "add_packed": Cost(SCATTERED),
    f"add_packed, {cases.MANY} ranks": Cost(cases.MANY * SCATTERED),
    "settle_packed": Cost(SCATTERED),
    cases.SKETCH: Cost(24, 1, 20, 60),  # five rows; each fills the device with threads a little more than once
    cases.HEAVIEST: Cost(0, 8, 40, 150),  # two reads of five cells of the table for each entry
    cases.ORQ_3: Cost(20, 9, 50, 180),
    cases.ORQ_9: Cost(20, 9, 250, 750),
    cases.BINGRAD_B: Cost(20, 6, 12, 75),
    cases.ROUND_3: Cost(12, 5, 50, 165),  # a dozen reads of each group, all but the first from the first cache
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

{state} The predictions follow from the bytes and instructions of each case
([`prediction.py`](../scripts/laboratory/kernels/prediction.py)), for an {gpu.name} that copies {copy:.2g} TB/s, has a second
cache twice as fast, and takes {launch:.1f} us a launch. Bytes are those of memory, an entry, all passes together. Each kernel's
registers and memory are in `results/resources-sm_90.json`. `scripts/lab predict` writes this page.

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
    rows = [[f"on {n / 1e6:g} M entries", "bytes", "launches", "predicted ms", "measured ms"]]
    for name, cost in COSTS.items():
        predicted, found = f"{1000 * cost.seconds(n, gpu):.3f}", figure(measured.get(name), "{:.3f}", "not yet")
        rows.append([name, f"{cost.memory:.3g}", str(cost.launches), predicted, found])
    return markdown(rows)


def measured(results: Sequence[Mapping[str, Any]], n: int, gpu: Gpu) -> dict[str, float]:
    """Pick the milliseconds of this GPU and size from the results of gpu_check."""
    stages = [stage for result in results if gpu.name in result["device"]["name"] for stage in result["stages"]]
    figures = [s["figures"] for s in stages if s["name"] == "kernels" and s["status"] == "ok"]
    return {line["name"]: line["ms"]["median"] for each in figures if each["settings"]["size"] == n for line in each["lines"]}
