"""What a reducer tells of a step to an observer, if it has one."""

from __future__ import annotations

from typing import Any, Protocol

from gradcomp.engine.bucket import Bucket
from gradcomp.native.memory import Update


class StepObserver(Protocol):
    """An observer of one rank's steps. Buckets may come in any order."""

    def before(self, bucket: Bucket) -> None:
        """Look at a bucket before its gradients are added to its residual."""

    def collected(self, bucket: Bucket) -> None:
        """Look at a bucket before its exchange."""

    def delivered(self, bucket: Bucket, update: Update) -> None:
        """Look at a bucket's mean update."""

    def step_done(self, reducer: Any) -> None:
        """Look at a step that has ended. Requests may begin here, the same on all ranks."""

    def discard(self) -> None:
        """Forget a step that will not end."""

    def conclude(self) -> None:
        """Wait for the replies to what began in step_done()."""
