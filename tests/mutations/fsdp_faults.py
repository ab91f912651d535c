"""Faults of the door for FSDP2: modules that exchange nothing, wrong places, ranks that wait for others."""

from __future__ import annotations

from mutations.fault import Fault

FSDP_FAULTS = (
    Fault(
        "parameters that come after attach() are not found among the optimizer's",
        "gradcomp/engine",
        "if self._slots.renew():",
        "if False:",
        ("test_update_programs.py",),
    ),
    Fault(
        "a whole parameter, between two passes, is taken for the shard",
        "gradcomp",
        'if fsdp_param.sharded_state.name != "SHARDED":',
        "if False:",
        ("test_update_programs.py",),
    ),
    Fault(
        "torch goes on to all-reduce over replicas beside gradcomp",
        "gradcomp/networks",
        "    group.mesh_info = (Data",
        "    _ = (Data",
        ("test_sums.py",),
    ),
    Fault(
        "ranks that agree with their replicas wait for those that do not",
        "gradcomp/engine",
        "            error = differ\n        for axis in",
        "            raise\n        for axis in",
        ("test_failures.py",),
    ),
)
