"""Commits: copies of a session's state in main memory, to which a training rolls back, as elastic jobs do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradcomp.core.compressor import Compressor
from gradcomp.engine import state
from gradcomp.engine.meeting import Owner, Snapshot


class Commits:
    """The last two commits: ranks may differ by one where one of them fails while the others commit."""

    def __init__(self) -> None:
        self._kept: deque[Snapshot] = deque(maxlen=2)

    def keep(self, compressor: Compressor, share: Callable[[Callable[[Tensor], Tensor]], dict[str, Any]], owner: Owner) -> None:
        """Keep a copy. share: copies this rank's share of a state, with a function that copies an array."""
        self._kept.append(Snapshot(compressor, state.in_main_memory(share(lambda view: view)), owner))

    @property
    def newest(self) -> Snapshot | None:
        """The newest commit; None before the first."""
        return self._kept[-1] if self._kept else None

    def after(self, steps: int, spec: str | None) -> Snapshot | None:
        """Return the newest commit after these steps, of this spec; None: of any. None if there is none."""
        found = [each for each in self._kept if each.share["steps"] == steps and spec in (None, str(each.compressor))]
        return found[-1] if found else None
