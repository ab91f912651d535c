"""Top-k: the entries of largest magnitude travel, with their places; the rest waits in the residual.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (EMNLP 2017); with momentum and masking, the core of
Lin et al., "Deep Gradient Compression" (ICLR 2018). The choice is exact, per bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradcomp import kernels, paths, routes
from gradcomp.core import Acc, Compressor, Steps, World


@dataclass(frozen=True)
class TopK(Compressor):
    """Sends k = max(1, ceil(ratio * n)) of a bucket's n entries."""

    ratio: float = 0.001  # lower = fewer bytes, staler gradients
    route: str = "allgather"  # tree and split send k sums on, however many ranks there are; split is the faster of the two
    wire: str = "compact"  # compact = 32 bits an entry, what rounding loses waits; exact = 32-bit values and 32-bit indices

    def __post_init__(self) -> None:
        paths.check_ratio("topk", self.ratio)
        routes.check("topk", self.route, self.wire)

    @property
    def sparse(self) -> bool:
        return True

    def eased(self, progress: float) -> TopK:
        return replace(self, ratio=self.ratio**progress)

    def exchange(self, acc: Acc, state: None, world: World) -> Steps:
        n = acc.value.numel()
        k = paths.count_of(self.ratio, n)
        taken = routes.room(acc, k, self.wire, self.route)
        kernels.take_topk(acc.value, k, **taken.arrays, velocity=routes.masked(acc, self.route), flag=acc.flag, peaks=acc.peaks)
        return (yield from routes.send(acc, taken, world, self.route))
