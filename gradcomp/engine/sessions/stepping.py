"""The steps of a session: gradients are handed in, and the step is finished. Before the first one the ranks meet."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from gradcomp import _version
from gradcomp.engine.parameters import Parameters, Slot
from gradcomp.engine.sessions.kept_entries import KeptEntries
from gradcomp.engine.sessions.membership import Membership
from gradcomp.engine.sessions.step_guard import StepGuard
from gradcomp.engine.sessions.training import Training
from gradcomp.engine.sessions.unused import Unused
from gradcomp.engine.steps.options import Options
from gradcomp.engine.steps.reducer import Reducer
from gradcomp.networks import Connection
from gradcomp.protocol import Compressor


class Stepping:
    """The steps of one model's exchanges on one rank.

    unknown_message: the door's error message for a gradient that belongs to no known parameter, with {shape} for its shape.
    unused_remedy: what the door's user is to do whose model trains past the exchange.
    ends_in_backward: a step ends in backward, and not in the optimizer's step(). reducer: of the present compressor.
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
        self._options, self._unknown_message, self._compressor = options, unknown_message, compressor
        self._membership, self._guard = Membership(network), StepGuard(network, ends_in_backward)
        self._held: dict[str, Slot] = {}
        self._kept_entries = KeptEntries(len(parameters.slots))
        own = weakref.proxy(self)  # so that a session ends with its last user
        self.training = Training(
            parameters,
            options,
            lambda: own._compressor,
            self._guard.before_optimizer,
            lambda: own.reducer.buckets,
            lambda: own.network.world.size if own._membership.sums else 1,
            lambda: own._guard.under_way,
            network.tell_failure,
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

    def mark_ready(self, slot: Slot, grad: Tensor | None = None, hold: bool = False) -> None:
        """Note that a parameter's gradient is complete. The last one of a bucket starts the bucket's exchange.

        grad: the gradient in the order of the parameter's memory; parameter.grad by default.
        hold: keep the gradient for finish_step() if the ranks have not met yet, since a meeting waits for the other ranks.
        """
        self._guard.refuse_after_failure()
        if self._guard.outlived:
            self._discard_step()
        self._guard.begin()
        self.training.note_exchange()
        if grad is None:
            self._kept_entries.keep(slot)
        if hold and not self.has_met:
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
        held, self._held = self._held, {}
        for slot in held.values():
            self._hand_over(slot)
        self._note_failure(lambda: self.reducer.finish_step(scale))
        self._guard.end()
        self._membership.note_step(scale)
        self.training.freezes.look(self.network.world.rank)
        for slot in self.parameters.slots:
            slot.close()

    def _hand_over(self, slot: Slot, grad: Tensor | None = None) -> None:
        self.meet()
        self._note_failure(lambda: self.reducer.mark_ready(slot.name, slot.open() if grad is None else grad))

    def note_sums(self) -> None:
        """Note that updates are sums over the ranks, before the first step shows it."""
        self._membership.sums = True

    def meet(self, leader: int | None = None, go_back: Callable[[int], bool] = lambda steps: False) -> None:
        """Wait for the other ranks, and check that all agree. Do nothing if they have met since the network was initialised.

        leader, go_back: see Membership.meet().
        """
        if not self.has_met:
            self._membership.meet(self.reducer, self._terms(), leader, go_back)

    def _terms(self) -> dict[str, str]:
        """Describe all that must be equal on all ranks."""
        own = {"gradcomp's version": _version.VERSION, "spec": self.spec}
        return own | self._options.terms | self.training.terms | self.parameters.terms()

    def _make_reducer(self, compressor: Compressor) -> Reducer:
        options, known = self._options, self.training.of_reducer(compressor) | {"observer": self._options.observer}
        reducer = Reducer(compressor, self.parameters.layers, self.network, options.bucket_mb, options.seed, **known)
        self.training.note_what_stays(reducer.keeps_residual or compressor.traits.momentum > 0)
        return reducer

    def _note_failure(self, call: Callable[[], None]) -> None:
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
