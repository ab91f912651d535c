"""Predicted times of the cases of `lab kernels` on a GPU.

A case takes the sum of its kernels' times, since no kernel starts before the one in front of it has ended. A kernel takes as
long as its bytes of memory at the speed of a copy, or as its computing, if that takes longer. Each launch adds a little, and
each meeting of a launch's blocks. Bytes are those of the comments in csrc/cuda. Computing is fitted to a record of an H200,
which has older kernels; what is newer is as those comments predict it. An H100 has the same multiprocessors.
"""

from __future__ import annotations

from typing import NamedTuple

from laboratory import kernel_cases as c


class Gpu(NamedTuple):
    """A GPU: its name, the bytes a second of a copy, and the seconds of a launch behind another kernel."""

    name: str
    copy: float
    launch: float


# Measured (results/kernels-cuda-h100.json, kernels-cuda-h200.json).
GPUS = H100, H200 = Gpu("NVIDIA H100", 2.97e12, 5e-6), Gpu("NVIDIA H200", 4.4e12, 5e-6)


# The seconds in which 32 blocks meet, predicted.
MEETING = 1.5e-6


class Kernel(NamedTuple):
    """A kernel's cost of an entry: bytes of memory, and picoseconds of computing where these take longer on an H200."""

    memory: float
    computing: float = 0.0


class Cost(NamedTuple):
    """The cost of a case: its kernels that read or write all entries, and the launches of a call, with those of all others.

    others: memsets, and kernels of torch. meetings: of all blocks of a launch.
    """

    kernels: tuple[Kernel, ...]
    launches: int = 1
    others: int = 0
    meetings: int = 0

    def seconds(self, n: int, gpu: Gpu) -> float:
        """Predict the seconds of a call on n entries."""
        slowest = [max(kernel.memory / gpu.copy, 1e-12 * kernel.computing) for kernel in self.kernels]
        return (self.launches + self.others) * gpu.launch + self.meetings * MEETING + n * sum(slowest)


# A scattered entry counts 80 bytes: 64 to read and to write the 32 bytes around its place, and 16 for the entry itself.
SCATTERED, ADD_PACKED = Kernel(80 * c.RATIO), Kernel(80 * c.RATIO, 0.16)
FLATTEN, SQUARES, SPREAD, WRITE = Kernel(8), Kernel(4), Kernel(8), Kernel(4)
COLLECT, MEASURE = Kernel(8), Kernel(8, 3.0)
# An offer in the optimizer's step, and what a simulation does around one in torch: zeros, a sum, a clamp.
OFFER, OFFER_AND_MEASURE, AROUND = Kernel(24), Kernel(24, 3.0), (Kernel(4), Kernel(12), Kernel(8))
# Blocks that meet are few: they read some 2 TB/s. A take counts digits and lists candidates, half as many again as it takes, or
# lists what is above thresholds.
DIGITS, LIST = Kernel(4, 2.0), Kernel(4.1, 2.0)
TAKE = DIGITS, LIST, Kernel(45 * c.RATIO, 100 * c.RATIO)
TAKE_ABOVE = LIST, Kernel(20 * c.RATIO, 100 * c.RATIO)
# Five rows: a sketch reads 20 bytes an entry from the second cache. The estimates are those of a sample, then marks of all
# entries, then the list.
SKETCH, ESTIMATES = Kernel(4, 4.5), (Kernel(0, 0.8), Kernel(0, 0.2), Kernel(0.13, 2.4), Kernel(0.13, 0.2))
FIND_3, FIND_5, FIND_9, FIND_MEANS = Kernel(4, 1.65), Kernel(4, 3.8), Kernel(4, 6.4), Kernel(4, 1.75)
ROUND_3, ROUND_5, ROUND_9, ROUND_MEANS = Kernel(7, 2.0), Kernel(7, 2.2), Kernel(7, 2.7), Kernel(7, 2.0)
ADD_3, ADD_5, ADD_9, ADD_2 = Kernel(7, 2.0), Kernel(7, 2.1), Kernel(7, 2.3), Kernel(7, 2.0)
ADD_3_MANY = Kernel(7 + c.MANY / 5, 4.1)
TAKE_BLOCKS, ADD_BLOCKS, ADD_BLOCKS_MANY = Kernel(8.66, 2.1), Kernel(8.66), Kernel(8 + 0.66 * c.MANY, 0.5 + 0.52 * c.MANY)

COSTS = {
    c.COPY: Cost((Kernel(8),)),
    c.ADD: Cost((Kernel(12),)),
    "sum_squares": Cost((SQUARES,), 2),
    "flatten": Cost((FLATTEN,)),
    "collect": Cost((COLLECT,), 1, 1),
    "collect, moments": Cost((MEASURE,), 2, 1),
    "offer_all": Cost((Kernel(8),)),
    "settle_all": Cost((Kernel(4),)),
    "spread": Cost((SPREAD,)),
    c.TAKE_TOPK: Cost(TAKE, 1, 1, 6),
    c.FEEDBACK: Cost((COLLECT, *TAKE), 2, 2, 6),
    "add_sparse": Cost((SCATTERED,)),
    "settle_sparse, nothing to do": Cost(()),
    "settle_sparse": Cost((SCATTERED,)),
    c.SDAGC: Cost((MEASURE, *TAKE_ABOVE), 4, 2, 6),
    "take_above": Cost(TAKE_ABOVE, 1, 1, 6),
    "pack_sparse": Cost((Kernel(28 * c.RATIO, 0.17),), 2),
    "unpack_sparse": Cost((Kernel(10 * c.RATIO, 0.22),)),
    "add_packed": Cost((ADD_PACKED,)),
    f"add_packed, {c.MANY} ranks": Cost((Kernel(80 * c.MANY * c.RATIO, 0.91),)),
    "settle_packed": Cost((ADD_PACKED,)),
    c.SKETCH: Cost((SKETCH,)),
    c.HEAVIEST: Cost(ESTIMATES, 4, 1, 7),
    c.ORQ_3: Cost((FIND_3, ROUND_3, ADD_3), 3),
    c.ORQ_5: Cost((FIND_5, ROUND_5, ADD_5), 3),
    c.ORQ_9: Cost((FIND_9, ROUND_9, ADD_9), 3),
    c.BINGRAD_B: Cost((FIND_MEANS, ROUND_MEANS, ADD_2), 3),
    c.ROUND_3: Cost((FIND_3, ROUND_3), 2),
    c.ADD_3: Cost((ADD_3,)),
    f"{c.ADD_3}, {c.MANY} ranks": Cost((ADD_3_MANY,)),
    "ORQ-3, settle": Cost((ADD_3,)),
    c.ROUND_B: Cost((FIND_MEANS, ROUND_MEANS), 2),
    c.BLOCKS: Cost((TAKE_BLOCKS, ADD_BLOCKS), 2),
    c.ROUND_BLOCKS: Cost((TAKE_BLOCKS,)),
    c.ADD_BLOCKS: Cost((ADD_BLOCKS,)),
    f"{c.ADD_BLOCKS}, {c.MANY} ranks": Cost((ADD_BLOCKS_MANY,)),
    "blocks, settle": Cost((ADD_BLOCKS,)),
    c.BLOCKS_SIMULATED: Cost((FLATTEN, TAKE_BLOCKS, Kernel(4), ADD_BLOCKS, SPREAD), 4, 1),
    c.SIMULATED: Cost((FLATTEN, OFFER, *TAKE, *AROUND, WRITE, SQUARES), 7, 4, 6),
    c.SDAGC_SIMULATED: Cost((FLATTEN, OFFER_AND_MEASURE, *TAKE_ABOVE, *AROUND, WRITE, SQUARES), 8, 4, 6),
    "Simulation step, dense": Cost((FLATTEN, Kernel(8), Kernel(8), Kernel(4), SPREAD), 4, 1),
}

# The cases whose kernels are still those of the H200's record: nvcc 13.0 makes the same machine code of them.
AS_RECORDED = frozenset(
    {c.COPY, c.ADD, "sum_squares", "flatten", "offer_all", "settle_all", "add_sparse", c.SKETCH}
    | {"settle_sparse", "settle_sparse, nothing to do"}
)


def milliseconds(n: int, name: str) -> dict[str, float]:
    """Predict the milliseconds of every case on n entries of a GPU, by the name that torch gives it. Empty if it is unknown."""
    return {case: 1000 * cost.seconds(n, gpu) for gpu in GPUS if gpu.name in name for case, cost in COSTS.items()}
