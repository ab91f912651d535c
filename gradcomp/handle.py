"""The handle of a model's exchange: its figures, its residuals, its state, and the change to another spec."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.auto import EXACT, Chooser
from gradcomp.core.compressor import Compressor
from gradcomp.engine.reducer import Stats
from gradcomp.engine.session import Session
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
    """One model's exchange on this rank: the result of gradcomp.ddp.attach(), and the base of Compression.

    Example:
        >>> handle = gradcomp.ddp.attach(model, "topk:ratio=0.01")
        >>> handle.stats()["compression"]
    """

    def __init__(self, session: Session, beginning: Beginning, stock: Sequence[torch.dtype]):
        self._session, self._stock = session, stock
        self._choose(beginning)

    def _choose(self, beginning: Beginning) -> None:
        self._chooser: Chooser | None = None
        if beginning.auto is not None:
            session: Any = weakref.proxy(self._session)  # the session has the chooser
            self._chooser = Chooser(session, beginning.auto, self._stock)
        self._session.set_chooser(self._chooser, "off" if beginning.auto is None else str(beginning.auto))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._session.spec!r}>"

    def stats(self) -> Stats:
        """Return figures of the last step on this rank.

        Returns:
            The figures by name. Under auto, "auto" is the choice, and its reason.

        Example:
            >>> handle.stats()["bytes_sent"]
        """
        stats = self._session.reducer.stats()
        if self._chooser is not None:
            stats["auto"] = self._chooser.report()
        return stats

    def residual(self) -> dict[str, Tensor]:
        """Copy this rank's residual.

        Returns:
            The residual by parameter name, in the parameters' shapes. It is zero where there is no error feedback.
        """
        return self._session.residual()

    def change(self, spec: str | Compressor) -> None:
        """Continue with another spec. All ranks call it, between two steps. Residuals are carried over.

        Args:
            spec: "name:knob=value", a compressor, or "auto".

        Raises:
            ValueError: The spec is wrong, or it would lose the residual. The exchange goes on as before.
            RuntimeError: The call came in the middle of a step, or before the optimizer has applied an update.

        Example:
            >>> handle.change("topk:ratio=0.001")
        """
        beginning, before = beginning_of(spec), (self._chooser, self._session.options.auto)
        self._choose(beginning)
        try:
            self._session.refuse("change()")
            self._session.replace(beginning.compressor)
            if self._chooser is not None:  # the session may have added error feedback, for the residual
                self._chooser.restart(self._session.spec)
        except BaseException:
            self._chooser = before[0]
            self._session.set_chooser(*before)
            raise

    def _watch(self, writers: Sequence[Writer], intervals: Intervals) -> None:
        session = weakref.proxy(self._session)  # the session has the observer
        named = dict(session.slots.without_gradient) | session.slots.parameters
        observer = Observer(writers, intervals, session, named, lambda: not session.view.skips_optimizer)
        session.watch(observer, f"{intervals}, of {len(named)} weights: {', '.join(named)}")

    def state_dict(self) -> dict[str, Any]:
        """Copy all that this rank's next step depends on.

        Returns:
            The state. States differ between ranks: save one for each rank.

        Raises:
            RuntimeError: The call came in the middle of a step.

        Example:
            >>> torch.save(handle.state_dict(), f"rank-{rank}.pt")
        """
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state, with the same spec, or auto, and the same model. All ranks call it, between two steps.

        A list of all ranks' states serves any number of ranks: the sum of the residuals stays the same. New ranks begin with an
        empty residual, and the mean of Adam's moments.

        Args:
            state: The result of state_dict() on this rank, or the list of the results of all ranks.

        Raises:
            ValueError: The state does not fit, or is damaged. Nothing of it is loaded.

        Example:
            >>> handle.load_state_dict([torch.load(f"rank-{rank}.pt") for rank in range(world)])
        """
        self._session.load_state_dict(state, None if self._chooser is None else make)
