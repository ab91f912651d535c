"""The handle of a model's exchange: its figures, its residuals, its state, and the change to another spec."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.auto import EXACT, Chooser
from gradcomp.core.compressor import Compressor
from gradcomp.engine.sessions.session import Session
from gradcomp.spec import Auto, auto_of, make
from gradcomp.telemetry.observer import Intervals, Observer, Writer


class Beginning(NamedTuple):
    """The compressor of the first steps, and the knobs of auto if it chooses others."""

    compressor: Compressor
    auto: Auto | None


def beginning_of(spec: str | Compressor) -> Beginning:
    """Read a spec: "auto", "auto:loss=high", or any that make() knows."""
    auto = auto_of(spec)
    return Beginning(make(spec if auto is None else EXACT.spec), auto)


class Handle:
    """One model's exchange on this rank."""

    def __init__(self, session: Session, beginning: Beginning, stock: Sequence[torch.dtype]):
        self._session, self._stock = session, stock
        self._choose(beginning)

    def _choose(self, beginning: Beginning) -> None:
        self._chooser: Chooser | None = None
        if beginning.auto is not None:
            session: Any = weakref.proxy(self._session)  # the session has the chooser
            self._chooser = Chooser(session, beginning.auto, self._stock)
        self._session.choose_in(self._chooser, "off" if beginning.auto is None else str(beginning.auto))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._session.spec!r}>"

    def stats(self) -> dict[str, Any]:
        """Return figures of the last step on this rank."""
        chosen = {} if self._chooser is None else {"auto": self._chooser.report()}
        return self._session.reducer.stats() | chosen

    def residual(self) -> dict[str, Tensor]:
        """Copy this rank's residual, by parameter name. It is zero where there is no error feedback."""
        return self._session.residual()

    def change(self, spec: str | Compressor) -> None:
        """Continue with another spec. All ranks call it, between two steps. Residuals are carried over.

        spec: "name:knob=value", a compressor, or "auto".
        """
        beginning, before = beginning_of(spec), (self._chooser, self._session.options.auto)
        self._choose(beginning)
        try:
            self._session.change(beginning.compressor)
            if self._chooser is not None:  # the session may have given the compressor error feedback, for what waits
                self._chooser.begin_anew(self._session.spec, same=True)
        except BaseException:
            self._chooser = before[0]
            self._session.choose_in(*before)
            raise

    def _watch(self, writers: Sequence[Writer], intervals: Intervals) -> None:
        session = weakref.proxy(self._session)  # the session has the observer
        named = dict(session.parameters.without_gradient) | {slot.name: slot.parameter for slot in session.parameters.slots}
        observer = Observer(writers, intervals, session, named, lambda: not session.training.lags)
        session.watch(observer, f"{intervals}, of {len(named)} weights: {', '.join(named)}")

    def state_dict(self) -> dict[str, Any]:
        """Copy all that this rank's next step depends on. States differ between ranks: save one for each rank."""
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state, with the same spec, or auto, and the same model. All ranks call it, between two steps.

        state: the result of state_dict() on this rank, or the list of the results of all ranks. The list serves any number of
        ranks: the sum of what waits stays the same. New ranks begin with nothing that waits, and the mean of Adam's moments.
        """
        self._session.load_state_dict(state, None if self._chooser is None else make)
