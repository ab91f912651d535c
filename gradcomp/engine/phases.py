"""The phases of a session, and the events that each of them refuses: all that affects the state machine is here."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from gradcomp.core.compressor import Compressor
from gradcomp.engine.slots import Slot

_FAILED = (
    "gradcomp refuses further steps on this rank, since a step failed in its middle ({reason}): its gradients were not "
    "exchanged, and entries that it had taken from the residual are lost. Start all ranks again from their last states"
)
IN_STEP = "{event} came in the middle of a step: call it after optimizer.step(), before the next backward"


class Phase(Enum):
    """A phase of a session: before the meeting of all ranks; between two steps; from a step's first gradient to its updates;
    after a step that failed.
    """

    UNMET, IDLE, EXCHANGING, FAILED = "unmet", "idle", "exchanging", "failed"


# What each event leads to, by phase: another phase, or a message that refuses it. Where nothing stands, the phase stays. A
# network that is initialised anew returns every session to UNMET. Where updates are exchanged, all of it happens after the
# optimizer's step, and no gradient comes as an event.
_BETWEEN_STEPS: Mapping[Phase, Phase | str] = {Phase.FAILED: _FAILED, Phase.EXCHANGING: IN_STEP}
TRANSITIONS: Mapping[str, Mapping[Phase, Phase | str]] = {
    "a gradient": {Phase.UNMET: Phase.EXCHANGING, Phase.IDLE: Phase.EXCHANGING, Phase.FAILED: _FAILED},
    "the end of a step": {Phase.EXCHANGING: Phase.IDLE, Phase.FAILED: _FAILED},
    "the optimizer's step": {Phase.FAILED: _FAILED},
    "a failure": dict.fromkeys(Phase, Phase.FAILED),
    "a new start": dict.fromkeys(Phase, Phase.UNMET),
    "change()": _BETWEEN_STEPS,
    "remove()": _BETWEEN_STEPS,
    "watch()": _BETWEEN_STEPS,
    "state_dict()": _BETWEEN_STEPS,
    "commit()": _BETWEEN_STEPS,
}


class Phases:
    """The phase of one session, which is stored.

    last: the stored one. since: the network's generation in which EXCHANGING or FAILED began; None for others. reason: of a
    failure.
    """

    def __init__(self, session: Any):
        self._session = weakref.proxy(session)
        self.last, self.since, self.reason = Phase.IDLE, None, ""  # type: Phase, object, str

    @property
    def now(self) -> Phase:
        """The present phase. One that is stored counts in the network's generation in which it began."""
        if self.since is self._session.network.generation:
            return self.last
        return Phase.IDLE if self._session.has_met else Phase.UNMET

    def note(self, event: str, here: object = None) -> None:
        """Go on to the phase after an event. Raise an error if the present phase refuses it. here: the network's generation."""
        session = self._session
        here = here or session.network.generation  # without calls: two events come in every step
        phase = self.last if self.since is here else Phase.IDLE if session.membership.met_in is here else Phase.UNMET
        found = TRANSITIONS[event].get(phase, phase)
        if isinstance(found, str):
            remedy = session.door.after_failure if phase is Phase.FAILED else ""
            raise RuntimeError(found.format(event=event, reason=self.reason) + remedy)
        self.last, self.since = found, here if found is Phase.EXCHANGING or found is Phase.FAILED else None


@dataclass
class Door:
    """A door: its messages for the user, and its kind of step.

    name: for messages. unknown: the message for a gradient of no known parameter, with {shape} for its shape. after_failure:
    ends the refusal of a step after one that failed, with a remedy beside a new start. holds: gradients wait for the end of the
    step if the ranks must meet first, since ranks hand them in in orders of their own. has_optimizers: a spec that acts on
    updates exchanges them after the steps of the user's optimizers. needs_gradients: a step without a gradient from the
    framework is none of a training, and one whose backward pass has not ended yet ends it, and calls another one.
    exchanges_gradients: the door does so itself, and the session only updates. agreed: what else must be equal on all ranks.
    """

    unknown: str = "a gradient of shape {shape} belongs to no known parameter"
    after_failure: str = ""
    holds: bool = False
    has_optimizers: bool = False
    needs_gradients: bool = False
    has_rates: bool = False
    name: str = ""
    exchanges_gradients: bool = False
    agreed: dict[str, str] = field(default_factory=dict)

    def acts_on_updates(self, compressor: Compressor) -> bool:
        """Decide whether a compressor exchanges the updates of the user's optimizers."""
        return self.has_optimizers and compressor.traits.acts_on_updates

    def start_stock_allreduce(self, slot: Slot) -> None:
        """Start the stock framework's exchange of a gradient, for a door that hands gradients in before it knows who does."""
        raise RuntimeError(f"no exchange takes the gradient of {slot.name!r}: the door starts no stock exchange")

    def discard(self) -> None:
        """Forget the backward pass under way: the step was discarded."""

    def calls_another(self, optimizer: torch.optim.Optimizer, has_gradients: bool) -> bool:
        """Say whether a step that begins calls another one of the same optimizer, and changes nothing before.

        has_gradients: some have come since the last step.
        """
        return False

    def adds_up(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """Say whether an optimizer steps with the ranks' sum in place of their mean. None: the door does not know."""
        return None
