"""What the doors to a network give to their users: figures, residuals, state and change of the exchange that was set up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradcomp.engine.session import Session
from gradcomp.protocol import Compressor
from gradcomp.spec import make


class Handle:
    """One model's exchange on this rank."""

    def __init__(self, session: Session):
        self._session = session

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._session.spec!r}>"

    def stats(self) -> dict[str, Any]:
        """Give figures of the last step on this rank."""
        return self._session.stats()

    def residual(self) -> dict[str, Tensor]:
        """Copy what this rank has not sent yet, by name; zeros where there is no error feedback."""
        return self._session.residual()

    def change(self, spec: str | Compressor) -> None:
        """Continue with another spec, between two steps and on all ranks; what has not been sent yet is carried over."""
        self._session.change(make(spec))

    def state_dict(self) -> dict[str, Any]:
        """Copy what this rank's next step depends on. Every rank has its own: save one for each."""
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what state_dict() gave on this rank."""
        self._session.load_state_dict(state)
