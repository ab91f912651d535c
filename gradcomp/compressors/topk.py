"""Top-k: the entries of largest magnitude travel, with their places; the rest waits in the residual.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (EMNLP 2017); with momentum and masking, the core of
Lin et al., "Deep Gradient Compression" (ICLR 2018). The choice is exact, per bucket; the exchange is an allgather.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradcomp import kernels, paths
from gradcomp.core import Acc, Compressor, Steps, World


@dataclass(frozen=True)
class TopK(Compressor):
    """Sends k = max(1, ceil(ratio * n)) of a bucket's n entries."""

    ratio: float = 0.001  # lower = fewer bytes, staler gradients
    wire: str = "compact"  # compact = 32 bits an entry, what rounding loses waits; exact = 32-bit values and 32-bit indices

    def __post_init__(self) -> None:
        paths.check_ratio("topk", self.ratio)
        paths.check_wire("topk", self.wire)

    @property
    def sparse(self) -> bool:
        return True

    def eased(self, progress: float) -> TopK:
        return replace(self, ratio=self.ratio**progress)

    def exchange(self, acc: Acc, state: None, world: World) -> Steps:
        n = acc.value.numel()
        k = paths.count_of(self.ratio, n)
        taken = paths.room(acc, k, self.wire)
        kernels.take_topk(acc.value, k, **taken.arrays, velocity=acc.velocity, flag=acc.flag, peaks=acc.peaks)
        return (yield from paths.sparse_allgather(acc, taken, world))
