"""Faults of local steps: lost progress, ranks that differ, and what a state forgets."""

from __future__ import annotations

from mutations.fault import Fault

LOCAL_FAULTS = (
    Fault(
        "16-bit weights count the rounding of their start as progress",
        "gradcomp/engine",
        "begun.to(own.dtype).float() - own",
        "begun - own",
        ("test_trouble.py",),
    ),
    Fault(
        "steps that came while a fragment was exchanged are lost",
        "gradcomp/engine",
        "new = begun + (weight - sent_at[i]) if sent_at else begun",
        "new = begun",
        ("test_fragments.py",),
    ),
    Fault(
        "what a rank has not sent does not stay in its weights",
        "gradcomp/engine",
        "yield start - waiting[name].view(start.shape) if name in self._kept & waiting.keys() else start, own",
        "yield start, own",
        ("test_local_steps.py",),
    ),
    Fault(
        "a mean that is not finite becomes the start of all ranks",
        "gradcomp/engine",
        "succeeded = all(bool(each.isfinite().all()) for each in self._progress)",
        "succeeded = True",
        ("test_trouble.py",),
    ),
    Fault(
        "an exchange that was over before its end is made again",
        "gradcomp/engine",
        "            if not bucket.has_started:\n                self._start(bucket)",
        "            if bucket.running is None:\n                self._start(bucket)",
        ("test_fragments.py",),
    ),
    Fault(
        "an entry of 0 travels as the mean of its neighbours",
        "gradcomp/messages",
        ".masked_fill(has_zero, 0.0)",
        "",
        ("test_means.py",),
    ),
    Fault(
        "entries behind the count of a payload come out",
        "gradcomp/messages",
        'values.masked_fill_(~are_there(payload["header"], capacity), 0.0)',
        "pass",
        ("test_means.py",),
    ),
    Fault(
        "the second message of a fragment goes before unlike ranks are told",
        "gradcomp",
        """            self._end_roll_call()
            self._under_way.session.reducer.advance()""",
        "            self._under_way.session.reducer.advance()",
        ("test_unlike_ranks.py",),
    ),
    Fault(
        "gradients are unscaled twice after unscale_()",
        "gradcomp",
        'getattr(of_inner.get("stage"), "name", "READY") == "READY"',
        "True",
        ("test_trouble.py",),
    ),
    Fault(
        "a copy of the weights stays behind in an exchange",
        "gradcomp/engine",
        "copy.add_((new - weight).to(copy))",
        "pass",
        ("test_weight_copies.py",),
    ),
    Fault(
        "the outer momentum moves a layer that no rank has moved",
        "gradcomp/engine",
        "start.grad = mean.view(start.shape) if moves else None",
        "start.grad = mean.view(start.shape)",
        ("test_layers_that_rest.py",),
    ),
    Fault(
        "a fragment that is not finite spoils those that went back before it",
        "gradcomp",
        "each.go_back(forgets=not is_finite)",
        "fragment.go_back(forgets=not is_finite)",
        ("test_buffers.py",),
    ),
    Fault(
        "buffers stay when the weights go back",
        "gradcomp/engine",
        "present[name].copy_(self.common[name])",
        "pass",
        ("test_buffers.py",),
    ),
    Fault(
        "the random draws of replicas are the same",
        "gradcomp/engine",
        "seed + SEEDS * (1 + replica)",
        "seed + SEEDS",
        ("test_edges.py",),
    ),
)
