"""gTop-k: the ranks' largest entries are summed pairwise along a tree, and each merge sends on only the k largest sums.

S. Shi, Q. Wang, K. Zhao, Z. Tang, Y. Wang, X. Huang, X. Chu, "A Distributed Synchronous SGD Algorithm with Global Top-k
Sparsification for Low Bandwidth Networks" (ICDCS 2019). A merge may drop a partial sum of an entry that another path brings to
the root. The published form loses this sum: its senders see the entry in the result and do not take theirs back. Here the rank
that dropped the sum keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradcomp.core.compressor import Acc, Compressor, Steps, Traits
from gradcomp.core.requests import World
from gradcomp.exchanges import tree
from gradcomp.messages.sparse import EXACT, count_of, ratio_knob


@dataclass(frozen=True)
class GTopK(Compressor):
    """Updates k = max(1, ceil(ratio * n)) of the model's n entries."""

    ratio: float = ratio_knob()

    @property
    def traits(self) -> Traits:
        return Traits(whole_model=True, selects=True, share=self.ratio)

    def ease(self, progress: float) -> GTopK:
        return replace(self, ratio=self.ratio**progress)

    def exchange(self, acc: Acc, state: None, world: World) -> Steps:
        taken = EXACT.take(acc, count_of(self.ratio, acc.residual.numel()))
        return (yield from tree.sparse_sum(acc, taken.payload, world))
