"""Where a spec that users pass begins: a compressor, and auto's turns if it is to choose others."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gradcomp import auto, knobs
from gradcomp.auto import Auto
from gradcomp.choosing.chooser import Chooser
from gradcomp.choosing.ways import FIRST
from gradcomp.core.compressor import Compressor
from gradcomp.engine.sessions.session import Session
from gradcomp.spec import make, settings_of


class Beginning(NamedTuple):
    """The compressor of the first steps, and the knobs of auto if it chooses others."""

    compressor: Compressor
    auto: Auto | None = None

    def chooser(self, session: Session, stock: Sequence[torch.dtype]) -> Chooser | None:
        """Make the turns of a session. stock: the types in which its door can exchange gradients past it."""
        if self.auto is None:
            return None
        own: Any = weakref.proxy(session)  # the session has the chooser
        return Chooser(own, self.auto, stock)


def beginning_of(spec: str | Compressor) -> Beginning:
    """Read a spec: "auto", "auto:loss=high", or any that make() knows."""
    if isinstance(spec, str) and spec.partition(":")[0].strip() == auto.NAME:
        chosen = Auto(**settings_of(spec, knobs.knobs_of(Auto)))
        return Beginning(make(FIRST.spec), chosen)
    return Beginning(make(spec))
