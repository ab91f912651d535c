"""gTop-k: every rank's largest entries meet pairwise in a tree, and each meeting lets only the k largest sums go on.

S. Shi, Q. Wang, K. Zhao, Z. Tang, Y. Wang, X. Huang, X. Chu, "A Distributed Synchronous SGD Algorithm with Global Top-k
Sparsification for Low Bandwidth Networks" (ICDCS 2019). A partial sum that a meeting drops is lost in the published form if the
same entry comes to the root on another way: its senders see that entry in the result and do not take theirs back. Here the
rank that dropped it keeps it then. faithful=true is the published form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradcomp.exchanges import tree
from gradcomp.knobs import knob
from gradcomp.messages.sparse import EXACT, count_of, ratio_knob
from gradcomp.protocol import Acc, Compressor, Steps, Traits
from gradcomp.requests import World


@dataclass(frozen=True)
class GTopK(Compressor):
    """k = max(1, ceil(ratio * n)) of the model's n entries come out of the tree."""

    ratio: float = ratio_knob()
    faithful: bool = knob(False, "the published form, which loses what an inner rank drops", ablation=True)

    @property
    def traits(self) -> Traits:
        return Traits(whole_model=True, sparse=True)

    def ease(self, progress: float) -> GTopK:
        return replace(self, ratio=self.ratio**progress)

    def exchange(self, acc: Acc, state: None, world: World) -> Steps:
        taken = EXACT.take(acc, count_of(self.ratio, acc.residual.numel()))
        return (yield from tree.sparse_sum(acc, taken.payload, world, faithful=self.faithful))
