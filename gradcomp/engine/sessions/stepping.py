"""The steps of a session: gradients are handed in, and the step is finished. Before the first one the ranks meet."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gradcomp import _version
from gradcomp.core.compressor import Compressor
from gradcomp.engine.parameters import Parameters, Slot
from gradcomp.engine.sessions.kept_entries import KeptEntries
from gradcomp.engine.sessions.meeting import Meeting
from gradcomp.engine.sessions.membership import Membership
from gradcomp.engine.sessions.step_guard import StepGuard
from gradcomp.engine.sessions.training import Training
from gradcomp.engine.sessions.turns import Turns
from gradcomp.engine.sessions.unused import Unused
from gradcomp.engine.state import carry
from gradcomp.engine.steps.options import Options
from gradcomp.engine.steps.reducer import Reducer
from gradcomp.networks import Connection


def _no_stock(slot: Slot) -> None:
    raise RuntimeError(f"nobody exchanges the gradient of {slot.name!r}: the door has given the session no stock exchange")


class Stepping:
    """The steps of one model's exchanges on one rank.

    unknown_message: the door's error message for a gradient that belongs to no known parameter, with {shape} for its shape.
    unused_remedy: what the door's user is to do whose model trains past the exchange.
    ends_in_backward: a step ends in backward, and not in the optimizer's step(). reducer: of the present compressor.
    turns: what the ranks do together between steps, if anything. by_stock: starts the stock exchange of a gradient.
    """

    def __init__(
        self,
        compressor: Compressor,
        parameters: Parameters,
        network: Connection,
        options: Options,
        unknown_message: str,
        unused_remedy: str,
        *,
        ends_in_backward: bool = False,
    ):
        self.parameters, self.network = parameters, network
        self.options, self._unknown_message, self._compressor = options, unknown_message, compressor
        self._membership, self._guard = Membership(network), StepGuard(network, ends_in_backward)
        self._held: dict[str, Slot] = {}
        self.turns: Turns | None = None
        self._stock: torch.dtype | None = None
        self.by_stock: Callable[[Slot], object] = _no_stock
        self._kept_entries = KeptEntries(len(parameters.slots))
        own = weakref.proxy(self)  # so that a session ends with its last user
        self.training = Training(
            parameters,
            options,
            lambda: own._compressor,
            self._guard.before_optimizer,
            partial(getattr, own, "reducer"),
            lambda: own.network.world.size if own._membership.sums else 1,
            lambda: own._guard.under_way,
        )
        weakref.finalize(self, self.training.end).atexit = False
        self.reducer = self._make_reducer(compressor)
        self._unused = Unused(parameters, network, lambda: own.spec, unused_remedy)

    @property
    def spec(self) -> str:
        return str(self._compressor)

    @property
    def has_met(self) -> bool:
        """True if the ranks have met since the network was last initialised."""
        return self._membership.has_met

    @property
    def stock(self) -> torch.dtype | None:
        """The widest type in which the stock framework is to exchange the gradients, past this session; None: the session does.

        Ranks that have not met since the network was initialised meet within the session.
        """
        return self._stock if self.options.observer is None and self.has_met else None

    @property
    def holds(self) -> bool:
        """True if gradients are to be held until the ranks have met, or taken a turn, which waits for the other ranks."""
        return not self.has_met or (self.turns is not None and self.turns.due)

    def slot(self, parameter: Tensor) -> Slot:
        """Find the slot of a parameter. Refuse an unknown parameter."""
        slot = self.parameters.slot(parameter)
        if slot is None:
            raise self.failed(ValueError(self._unknown_message.format(shape=tuple(parameter.shape))))
        return slot

    def failed(self, error: BaseException) -> BaseException:
        """Note that this rank's step failed, and return the error. Further steps are refused until the ranks meet again."""
        self._membership.part()
        self._discard_step()
        self._guard.fail(error)
        self.training.note_exchange()  # its steps are refused from now on, also before the first exchange
        return error

    def begin(self, hold: bool = False) -> None:
        """Begin a step, or go on with it. hold: meet the other ranks, and take a turn with them, in finish_step()."""
        self._guard.refuse_after_failure()
        if self._guard.outlived:
            self._discard_step()
        if not self._guard.under_way and not hold:
            self._take_turn()
        self._guard.begin()
        self.training.note_exchange()
        if self.stock is not None:
            self.reducer.clock.note_gradient()

    def mark_ready(self, slot: Slot, grad: Tensor | None = None, hold: bool = False) -> None:
        """Note that a parameter's gradient is complete. The last one of a bucket starts the bucket's exchange.

        grad: the gradient in the order of the parameter's memory; parameter.grad by default.
        hold: keep the gradient for finish_step() where the session holds.
        """
        hold = hold and self.holds
        self.begin(hold)
        if grad is None and (hold or self.stock is None):  # the stock framework writes sums into the gradient
            self._kept_entries.keep(slot)
        if hold:
            self._held[slot.name] = slot
        else:
            self._hand_over(slot, grad)

    def finish_step(self, scale: float = 1.0) -> None:
        """Finish the step: the gradients are then scale times the mean update. Only the first call in a step acts."""
        self._guard.refuse_after_failure()
        if not self._guard.under_way:
            return
        self._note_failure(self._kept_entries.check)
        if self._held:
            self.meet()
            self._take_turn()
        held, self._held = self._held, {}
        for slot in held.values():
            self._hand_over(slot)
        if self.stock is None:
            self._note_failure(lambda: self.reducer.finish_step(scale))
            self._membership.note_step(scale)
        else:
            self.reducer.note_stock_step(self.parameters.bytes_in(self.stock))
        self._guard.end()
        self.training.freezes.look(self.network.world.rank)
        for slot in self.parameters.slots:
            slot.close()
        if self.turns is not None:
            self.turns.note_step()

    def _take_turn(self) -> None:
        if self.turns is not None and self.turns.due:
            self.meet()
            if self.turns.due:  # the meeting may have begun them anew
                self._note_failure(self.turns.take)

    def _hand_over(self, slot: Slot, grad: Tensor | None = None) -> None:
        self.meet()
        if self.stock is None:
            self._note_failure(lambda: self.reducer.mark_ready(slot.name, slot.open() if grad is None else grad))
        else:
            self._note_failure(lambda: self.by_stock(slot))

    def note_sums(self) -> None:
        """Note that updates are sums over the ranks, before the first step shows it."""
        self._membership.sums = True

    def meet(self, leader: int | None = None, go_back: Callable[[int], bool] = lambda steps: False) -> None:
        """Wait for the other ranks, and check that all agree. Do nothing if they have met since the network was initialised.

        leader, go_back: see Membership.meet().
        """
        if not self.has_met:
            follow = {} if self.turns is None else {"follow": self._follow}
            self._membership.meet(lambda: self.reducer, self._terms(), leader, go_back, **follow)

    def _follow(self, meeting: Meeting) -> None:
        """Go on with the leader's compressor: under turns, ranks that are new to a training have another one."""
        assert self.turns is not None
        spec, self._stock = meeting.of_leader(self.spec), None
        self.turns.begin_anew(spec, same=spec == self.spec)

    def follow(self, compressor: Compressor) -> None:
        """Continue with the compressor of the rank that leads a meeting, in this meeting."""
        self.reducer, self._compressor = carry(self.reducer, self._make_reducer(compressor)), compressor

    def _terms(self) -> dict[str, str]:
        """Describe all that must be equal on all ranks."""
        own = {"gradcomp's version": _version.VERSION, "spec": self.spec if self.turns is None else self.options.auto}
        return own | self.options.terms | self.training.terms | self.parameters.terms()

    def _make_reducer(self, compressor: Compressor) -> Reducer:
        options, known = self.options, self.training.of_reducer(compressor) | {"observer": self.options.observer}
        return Reducer(compressor, self.parameters.layers, self.network, options.bucket_mb, options.seed, **known)

    def _note_failure(self, call: Callable[[], object]) -> None:
        """Call a function. Note its failure, if it fails, so that further steps are refused."""
        try:
            call()
        except BaseException as error:
            self.failed(error)
            raise

    def _discard_step(self) -> None:
        """Discard the step under way. The entries that it has taken from the residual are lost."""
        self.reducer.abort()
        self._kept_entries.discard()
        self._held.clear()
        self._guard.end()
