"""Faults of momentum: what is masked, what the optimizer must not do again."""

from __future__ import annotations

from mutations.fault import Fault

MOMENTUM_FAULTS = (
    Fault(
        "a knob is ignored: masking=false masks all the same",
        "gradcomp/engine",
        "if not self.masking or not self.inner.traits.selects:",
        "if not self.inner.traits.selects:",
        ("test_feedback.py",),
    ),
    Fault(
        "a flush is forgotten: entries that it sent count as waiting",
        "gradcomp/exchanges",
        "acc.mask.note_all(update[:1].isfinite())",
        "pass",
        ("test_own_momentum.py",),
    ),
    Fault(
        "Adam's direction has the first moment also where an entry waited",
        "gradcomp/engine",
        "kernels.Adaptive(*second) if mask is None else",
        "kernels.Adaptive(*second) if mask is not None else",
        ("test_adam.py",),
    ),
    Fault(
        "Adam steps a second time after the exchange has stepped in its place",
        "gradcomp/engine",
        "                parameter.grad = None\n",
        "",
        ("test_adam.py",),
    ),
    Fault(
        "the weight decay is applied by both, the exchange and SGD",
        "gradcomp/engine",
        'HIDDEN = ("momentum", "weight_decay")',
        'HIDDEN = ("momentum",)',
        ("test_own_momentum.py",),
    ),
)
