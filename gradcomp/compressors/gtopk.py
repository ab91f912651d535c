"""gTop-k: every rank's largest entries meet pairwise in a tree, and each meeting lets only the k largest sums go on.

S. Shi, Q. Wang, K. Zhao, Z. Tang, Y. Wang, X. Huang, X. Chu, "A Distributed Synchronous SGD Algorithm with Global Top-k
Sparsification for Low Bandwidth Networks" (ICDCS 2019). A partial sum that a meeting drops is lost in the published form if the
same entry comes to the root on another way: its senders see that entry in the result and do not take theirs back. Here the
rank that dropped it keeps it then. faithful=true is the published form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradcomp import kernels, paths, tree, wire
from gradcomp.core import Acc, Compressor, Steps, World


@dataclass(frozen=True)
class GTopK(Compressor):
    """k = max(1, ceil(ratio * n)) of the model's n entries come out of the tree."""

    ratio: float = 0.001  # lower = fewer bytes, staler gradients
    faithful: bool = False  # the published form, which loses what an inner rank drops

    def __post_init__(self) -> None:
        paths.check_ratio("gtopk", self.ratio)

    @property
    def whole_model(self) -> bool:
        return True

    @property
    def sparse(self) -> bool:
        return True

    def eased(self, progress: float) -> GTopK:
        return replace(self, ratio=self.ratio**progress)

    def exchange(self, acc: Acc, state: None, world: World) -> Steps:
        n = acc.value.numel()
        own = wire.empty(wire.sparse_form(paths.count_of(self.ratio, n)), acc.value.device)
        kernels.take_topk(acc.value, **own.arrays, k=len(own["values"]), flag=acc.flag, peaks=acc.peaks)
        return (yield from tree.sparse_sum(acc, own, world, faithful=self.faithful))
