"""Faults of the moments that the exchange keeps in the optimizer's place, as users replace, load and scale it."""

from __future__ import annotations

from mutations.fault import Fault

MOMENTS_FAULTS = (
    Fault(
        "moments of a maximizing optimizer change hands without their sign",
        "gradcomp/engine",
        "factor = zip(self.arrays, kept, strict=True), sums * sign_of(group)",
        "factor = zip(self.arrays, kept, strict=True), sums",
        ("test_other_states.py",),
    ),
    Fault(
        "moments go on after the optimizer's state was cleared",
        "gradcomp/engine",
        "is_loaded or state.__sizeof__() == self._SIZES.get(type(state))",
        "is_loaded",
        ("test_other_states.py",),
    ),
    Fault(
        "the residual of abandoned steps stays where the optimizer is rolled back",
        "gradcomp/engine",
        "moments_only=generation[0] == before[0]",
        "moments_only=True",
        ("test_other_states.py",),
    ),
    Fault(
        "the weight decay of a skipped step acts twice with a fused optimizer",
        "gradcomp/engine",
        "seeds, decays, before.successes.get(layout.device))",
        "seeds, decays)",
        ("test_skipped_steps.py",),
    ),
    Fault(
        "layers of two optimizers share a bucket, and one of their momenta",
        "gradcomp/engine",
        "parts[name] if parts else 0",
        "0",
        ("test_several_optimizers.py",),
    ),
    Fault(
        "a scaler that skips one optimizer takes back what another has applied",
        "gradcomp/engine",
        "{n: Delivery(self.buckets, slots) for n in self._groups}",
        "dict.fromkeys(self._groups, Delivery(self.buckets, slots))",
        ("test_several_optimizers.py",),
    ),
    Fault(
        "a layer that begins late has the bias correction of its bucket",
        "gradcomp/engine",
        "for layer, late in state.late.items() if layer not in idle}",
        "for layer, late in () if layer not in idle}",
        ("test_late_layers.py",),
    ),
    Fault(
        "a branch of the model counts Adam's steps before it is used",
        "gradcomp",
        "session.reducer.note_unused(",
        "list(",
        ("test_late_branch.py",),
    ),
    Fault(
        "a layer that is frozen in a skipped step counts one step too few",
        "gradcomp/engine",
        "            self.steps -= 1\n        else:\n",
        "            self.steps -= 1\n        if self.idle:\n",
        ("test_late_layers.py",),
    ),
    Fault(
        "a saved optimizer is not marked where the ranks have its moments",
        "gradcomp/engine",
        '            for group in state["param_groups"]:\n                group[MARK] = True\n',
        "            pass\n",
        ("test_usual_checkpoints.py",),
    ),
    Fault(
        "Adam's weight decay within gradients has the loss scale",
        "gradcomp/engine",
        "            flat.div_(self.loss_scale)\n",
        "            flat.div_(1.0)\n",
        ("test_late_branch.py",),
    ),
    Fault(
        "Adam's weight decay within gradients acts again as AdamW's",
        "gradcomp/engine",
        'if group["weight_decay"] and group.get("decoupled_weight_decay"):\n        torch',
        'if group["weight_decay"]:\n        torch',
        ("test_moments.py",),
    ),
    Fault(
        "negative second moments are loaded",
        "gradcomp/engine",
        "if bool((each < 0).any()):",
        "if False:",
        ("test_damaged_moments.py",),
    ),
    Fault(
        "an exchange that no step applied stays in the residual",
        "gradcomp/engine",
        "            state.return_to(reducer, self._slots.shapes, self._share)\n",
        "",
        ("test_unapplied.py",),
    ),
    Fault(
        "an update with momentum stays in the gradients of the next exchange",
        "gradcomp/engine",
        "parameter.grad.copy_(own)",
        "pass",
        ("test_unapplied.py",),
    ),
    Fault(
        "an outer step() that is to begin its exchange is refused",
        "gradcomp/engine",
        'and (self.last.is_nested or not hasattr(optimizer, "synchronize"))',
        "",
        ("test_groups.py",),
    ),
    Fault(
        "random rounding suits an optimizer that compares gradients of one step",
        "gradcomp/engine",
        " and all(bucket.traits.exact for bucket in self.buckets)",
        "",
        ("test_unapplied.py",),
    ),
    Fault(
        "a small change of Adam's directions passes",
        "gradcomp/engine",
        "SMALLEST_CHANGE = 1e-4, 1e-2",
        "SMALLEST_CHANGE = 1e-2, 1e-2",
        ("test_changed_gradients.py",),
    ),
)
