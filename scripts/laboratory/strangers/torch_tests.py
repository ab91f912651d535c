"""torch's own tests of DistributedDataParallel that need no GPU, for pytest: each starts two processes by itself.

GRADCOMP_SPEC: the spec that is attached to every model; empty or unset = none.
"""

from __future__ import annotations

import os
import tempfile

os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "2"}
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())

from torch.testing._internal.distributed import distributed_test

from laboratory.strangers.attached import attach_to_ddp

if spec := os.environ.get("GRADCOMP_SPEC"):
    attach_to_ddp(spec)


class TestDDP(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """The tests, which start processes by the method that torch's own runner takes."""

    def setUp(self) -> None:
        super().setUp()  # type: ignore[no-untyped-call]
        self._spawn_processes()
