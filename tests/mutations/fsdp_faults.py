"""Faults of the door for FSDP2: modules that exchange nothing, wrong places, ranks that wait for others."""

from __future__ import annotations

from mutations.fault import Fault

FSDP_FAULTS = (
    Fault(
        "a module's gradients stay local after one of its layers was frozen in mid-training",
        "gradcomp/engine",
        "if bucket.grads and not bucket.has_started:",
        "if False:",
        ("test_passes.py",),
    ),
    Fault(
        "gradients are laid over the wrong parameters where some have none",
        "gradcomp",
        "if reducer.is_native or not self._holds(tensor, sum(size for _, size in trained)):",
        "if reducer.is_native:",
        ("test_passes.py",),
    ),
    Fault(
        "an all-reduce of the user's is exchanged, since one was announced before",
        "gradcomp/networks",
        "if self._announced is None or self._announced[0]() is not tensor:",
        "if self._announced is None:",
        ("test_passes.py",),
    ),
    Fault(
        "ranks that agree with their replicas wait for those that do not",
        "gradcomp/engine",
        "            error = differ\n        try:",
        "            raise\n        try:",
        ("test_failures.py",),
    ),
)
