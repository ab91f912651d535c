"""The handle of a model's exchange: its figures, its residuals, its state, and the change to another spec."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from gradcomp.auto import EXACT, Chooser
from gradcomp.core.compressor import Compressor
from gradcomp.engine.phases import IN_STEP, Door
from gradcomp.engine.reducer import Options, Stats
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Slots
from gradcomp.engine.updates.steps import in_closure
from gradcomp.networks import Connection
from gradcomp.spec import Auto, auto_of, make
from gradcomp.telemetry.observer import Intervals, Observer, Writer

_REMOVED = "remove() has ended this exchange, and the model trains as without gradcomp: begin another one, as by attach()"

P = ParamSpec("P")
T = TypeVar("T")


def by_name(most: int, sentence: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Refuse, with a sentence, more arguments by position than so many, and an optimizer among them."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> T:
            if len(args) > most or any(isinstance(each, torch.optim.Optimizer) for each in args):
                raise TypeError(sentence)
            return function(*args, **options)

        return checked

    return decorate


def beginning_of(spec: str | Compressor) -> tuple[Compressor, Auto | None]:
    """Read a spec. Return the compressor of the first steps, and the knobs of auto if it chooses others."""
    auto = auto_of(spec)
    return make(spec if auto is None else EXACT.spec), auto


class _Removed:
    """What a handle has after remove(). kept: the session, which averages states of optimizers that have not stepped yet."""

    spec = "nothing, since remove()"

    def __init__(self, session: Session):
        self.kept = session

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(_REMOVED)


class Handle:
    """The exchange of one model on this rank, as attach() returns it.

    Example:
        >>> handle = gradcomp.ddp.attach(model, "topk:ratio=0.01")
        >>> handle.stats()["payload_ratio"]
    """

    _give_back: Callable[[], None]  # by the door: lets torch or Horovod exchange gradients again

    def __init__(
        self,
        spec: str | Compressor,
        slots: Slots,
        network: Connection,
        options: Options,
        door: Door,
        stock: Sequence[torch.dtype] = (),
    ):
        """stock: the types in which the door's framework can exchange the gradients in the session's place, for auto."""
        compressor, auto = beginning_of(spec)
        door.agreed["remove()"] = "not called"
        self._session, self._stock = Session(compressor, slots, network, options, door), stock
        self._choose(auto)

    def _choose(self, auto: Auto | None) -> None:
        session: Any = weakref.proxy(self._session)  # the session has the chooser
        self._session.turns = None if auto is None else Chooser(session, auto, self._stock)
        self._session.attend()

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
        if self._session.reducer.on_updates and (norm := self._session.updates.gradients.norm) is not None:
            stats["grad_norm"] = norm
        if self._session.turns is not None:
            stats["auto"] = self._session.turns.report()
            stats["exchanges"] = self._session.turns.exchanges(stats["exchanges"])
        return stats

    def residual(self) -> dict[str, Tensor]:
        """Copy this rank's residual.

        Returns:
            The residual by parameter name, in the parameters' shapes. It is zero where there is no error feedback.
        """
        return self._session.resume.residual()

    def change(self, spec: str | Compressor) -> None:
        """Continue with another spec. All ranks call it, between two steps. set_spec() is the same.

        Residuals are carried over. Where a spec that exchanges gradients follows one that exchanges updates, the mean of all
        residuals moves the weights at once, and the optimizers' states become their means.

        Args:
            spec: "name:knob=value", a compressor, or "auto".

        Raises:
            ValueError: The spec is wrong, or it would lose the residual. The exchange continues as before.
            RuntimeError: The call came in the middle of a step.

        Example:
            >>> handle.set_spec("topk:ratio=0.001")
        """
        (compressor, auto), before = beginning_of(spec), self._session.turns
        self._choose(auto)
        try:
            self._session.phases.note("change()")
            if self._session.updates.in_step and in_closure():
                raise RuntimeError(IN_STEP.format(event="change()"))
            self._session.resume.change(compressor)
            if self._session.turns is not None:  # the session may have added error feedback, for the residual
                self._session.turns.restart(self._session.spec)
        except BaseException:
            self._session.turns = before
            self._session.attend()
            raise

    set_spec = change

    def remove(self) -> None:
        """Send what still waits, and let torch or Horovod exchange gradients as without gradcomp. All ranks call it.

        The mean of all residuals moves the weights at once, and the optimizers' states become their means, so that nothing is
        lost. A second call does nothing. attach() may follow. DDP keeps a hook, which does what DDP does itself.

        Raises:
            RuntimeError: The call came in the middle of a step, or another rank has not called it within the timeout.
            ValueError: Another rank called set_spec() instead. The exchange continues as before.

        Example:
            >>> handle.remove()
        """
        if self._is_removed:
            return
        session = self._session
        session.phases.note("remove()")
        try:
            session.meet()
            session.door.agreed["remove()"] = "called"
            self.change(EXACT.spec)
        finally:
            session.door.agreed["remove()"] = "not called"
        self._give_back()
        removed: Any = _Removed(session)
        self._session = removed

    @property
    def _is_removed(self) -> bool:
        return isinstance(self._session, _Removed)

    def _watch(self, writers: Sequence[Writer], intervals: Intervals) -> None:
        session = weakref.proxy(self._session)  # the session has the observer
        named = dict(session.slots.without_gradient) | session.slots.parameters
        self._session.watch(Observer(writers, intervals, session, named))

    def state_dict(self) -> dict[str, Any]:
        """Copy everything that this rank's next step depends on.

        Returns:
            The state. States differ between ranks: save one for each rank.

        Raises:
            RuntimeError: The call came in the middle of a step.

        Example:
            >>> torch.save(handle.state_dict(), f"rank-{rank}.pt")
        """
        return self._session.resume.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state, with the same spec, or auto, and the same model. All ranks call it, between two steps.

        A list of all ranks' states serves any number of ranks: the mean of the residuals stays. New ranks begin with an empty
        residual.

        Args:
            state: The result of state_dict() on this rank, or the list of the results of all ranks.

        Raises:
            ValueError: The state does not fit, or is damaged. Nothing of it is loaded; after the first step, on no rank.

        Example:
            >>> handle.load_state_dict([torch.load(f"rank-{rank}.pt", weights_only=True) for rank in range(world)])
        """
        self._session.resume.load_state_dict(state, None if self._session.turns is None else make)
