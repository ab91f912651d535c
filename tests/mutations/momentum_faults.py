"""Faults of momentum: masks, and steps that the optimizer must not repeat."""

from __future__ import annotations

from mutations.fault import Fault

MOMENTUM_FAULTS = (
    Fault(
        "directions are as short as a rank's own second moment makes them",
        "gradcomp/engine",
        "adam.share * state.noise.lengthening",
        "adam.share",
        ("test_noise.py", "test_momentum.py"),
    ),
    Fault(
        "a gradient that is not finite spoils what is known of the ranks' noise",
        "gradcomp/engine",
        "torch.where(found.isfinite().all(), KEPT * self.sums + found, self.sums)",
        "KEPT * self.sums + found",
        ("test_noise.py",),
    ),
    Fault(
        "the weight decay of a skipped step is added twice",
        "gradcomp/engine",
        "decays = {} if skipped else self._decays(optimizer, layout, share)",
        "decays = self._decays(optimizer, layout, share)",
        ("test_skipped_steps.py",),
    ),
    Fault(
        "what waits of a frozen layer moves it",
        "gradcomp/engine",
        "if not each.requires_grad]",
        "if False]",
        ("test_frozen.py",),
    ),
    Fault(
        "a frozen layer decays",
        "gradcomp/engine",
        "if decay and parameter.requires_grad:",
        "if decay:",
        ("test_skipped_steps.py",),
    ),
    Fault(
        "Adam counts steps whose gradients were refused",
        "gradcomp/engine",
        "max(0, self.steps - int(self.refused))",
        "self.steps",
        ("test_skipped_steps.py",),
    ),
    Fault(
        "an entry that nothing came for counts as one that waited",
        "csrc",
        "old_residual == 0.0f ? static_cast<uint8_t>(step - 1) : sent_in",
        "sent_in",
        ("test_masking.py", "test_feedback.py"),
    ),
    Fault(
        "a neighbour's share of what waits is forgotten",
        "gradcomp/engine",
        "residual_is_local = not self.traits.shares_residual",
        "residual_is_local = True",
        ("test_masking.py",),
    ),
    Fault(
        "a flush is forgotten: entries that it sent count as waiting",
        "gradcomp/exchanges",
        "acc.mask.note_all(update[:1].isfinite())",
        "pass",
        ("test_moments.py", "test_momentum.py"),
    ),
    Fault(
        "Adam's direction has the first moment also where an entry waited",
        "gradcomp/engine",
        "mask=None if self.adds_gradients else self.mask,",
        "mask=None,",
        ("test_masking.py",),
    ),
    Fault(
        "Adam steps a second time after the exchange has stepped in its place",
        "gradcomp/engine",
        "                parameter.grad = None\n",
        "",
        ("test_moments.py",),
    ),
    Fault(
        "the weight decay is applied by both, the exchange and SGD",
        "gradcomp/engine",
        'HIDDEN = ("momentum", "weight_decay")',
        'HIDDEN = ("momentum",)',
        ("test_moments.py", "test_momentum.py"),
    ),
)
