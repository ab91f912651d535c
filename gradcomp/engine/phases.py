"""The phases of a session, and the events that each of them refuses: all that affects the state machine is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from gradcomp.engine.slots import Slot

_FAILED = (
    "gradcomp refuses further steps on this rank, since a step failed in its middle ({reason}): its gradients were not "
    "exchanged, and entries that it had taken from the residual are lost. Start all ranks again from their last states"
)
_IN_STEP = "{event} came in the middle of a step: call it after optimizer.step(), before the next backward"
_WAITS = "{event} came between an exchange and optimizer.step(), which is to apply its update: call it after optimizer.step()"
_UNFINISHED = (
    "backward() ended before all gradients were exchanged: layers that are frozen, or unused in some steps, need "
    "find_unused_parameters=True"
)


class Phase(Enum):
    """A phase of a session: before the meeting of all ranks; between two steps; from a step's first gradient to its updates;
    until the optimizer has applied updates that hold its momentum; after a step that failed.
    """

    UNMET, IDLE, BACKWARD, DELIVERED, FAILED = "unmet", "idle", "backward", "delivered", "failed"


# The phases in which an event is refused, and the message. A network that is initialised anew returns every session to UNMET.
# A gradient leads to BACKWARD, the end of a step to IDLE or DELIVERED, the optimizer's step from DELIVERED to IDLE. A meeting
# leads from UNMET to IDLE, an error in a step to FAILED, and load_state_dict() and a rollback from any phase to UNMET.
# The optimizer's step ends a step in BACKWARD, and is refused there only at a door whose steps end in backward.
REFUSED: Mapping[str, Mapping[Phase, str]] = {
    "a gradient": {Phase.FAILED: _FAILED},
    "the end of a step": {Phase.FAILED: _FAILED},
    "the optimizer's step": {Phase.FAILED: _FAILED, Phase.BACKWARD: _UNFINISHED},
    "change()": {Phase.FAILED: _FAILED, Phase.BACKWARD: _IN_STEP, Phase.DELIVERED: _WAITS},
    "watch()": {Phase.FAILED: _FAILED, Phase.BACKWARD: _IN_STEP},
    "state_dict()": {Phase.FAILED: _FAILED, Phase.BACKWARD: _IN_STEP},
    "commit()": {Phase.FAILED: _FAILED, Phase.BACKWARD: _IN_STEP},
}


@dataclass
class Door:
    """A door: its messages for the user, and its kind of step.

    name: for messages. unknown: the message for a gradient of no known parameter, with {shape} for its shape. unused: advice
    for a user who trains without the exchange; empty: there is no warning. changed: lines for a user who changes gradients
    before step(), after a colon. after_failure: ends the refusal of a step after one that failed, with a remedy beside a new
    start. ends_in_backward: a step ends in backward, and not in the optimizer's step(). holds: gradients wait for the end of
    the step if the ranks must meet first, since ranks hand them in in orders of their own.
    """

    unknown: str = "a gradient of shape {shape} belongs to no known parameter"
    unused: str = ""
    changed: str = ""
    after_failure: str = ""
    ends_in_backward: bool = False
    holds: bool = False
    name: str = ""

    def start_stock_allreduce(self, slot: Slot) -> None:
        """Start the stock framework's exchange of a gradient, for a door that hands gradients in before it knows who does."""
        raise RuntimeError(f"no exchange takes the gradient of {slot.name!r}: the door starts no stock exchange")
