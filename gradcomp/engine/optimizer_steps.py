"""The steps of any optimizer: calls around each, first all checks and then all acts, and words for the user at their line."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradcomp.engine.slots import Slots
from gradcomp.networks import Connection

log = logging.getLogger("gradcomp")

# Steps of an optimizer without an exchange, before the warning.
STEPS_BEFORE_WARNING = 3
# Steps, of any optimizers, that look for a momentum that is missed under a new spec.
LOOKS = 4
# Packages between a user's line and the hook.
INNER_PACKAGES = ("accelerate", "gradcomp", "horovod", "lightning", "torch", "transformers")
# Older versions of torch have only the second.
_SCALERS = (getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler), torch.cuda.amp.GradScaler)
_UNKNOWN_SCALER = (
    "a GradScaler steps the optimizer, but gradcomp does not know its scale. A clip after unscale_() is then not understood, "
    "and cuts SGD's momentum to the norm of a gradient; and whenever the scale changes, entries of the residual, and the "
    "momentum, count too much or too little. Pass scaler=scaler where you pass the spec"
)

_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(listener: Any) -> None:
    """Call a session's check_step, before_step and after_step around every step from now on, as long as it lives."""
    _register_once()
    _listeners.add(listener)


def listeners() -> list[Any]:
    """List all listeners that live."""
    return list(_listeners)


def views_beside(view: Any) -> list[Any]:
    """List the views of this rank's other sessions. Simulated ranks may share a process. view: a session's, or a part of it."""
    every = [each for each in listeners() if each.network.ready]
    own = next((each for each in every if any(part is view for part in (each.view, *each.view.parts))), None)
    same = [] if own is None else [each for each in every if each.network.world.rank == own.network.world.rank]
    return [each.view for each in same if each is not own]


@functools.cache
def _register_once() -> None:
    """Register the hooks for good: removing one fails while torch goes through all of them, and sessions end at any time."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> tuple[Any, Any] | None:
    """Act before a step, and after the user's hooks: as the last hook of the optimizer's own, which torch calls last."""
    own = optimizer._optimizer_step_pre_hooks
    if not own and len(_global_optimizer_pre_hooks) == 1:
        return _act(optimizer, args, options)
    if (key := next((key for key, hook in own.items() if hook is _act), None)) is None:
        optimizer.register_step_pre_hook(_act)
    else:
        own[key] = own.pop(key)
    return None


def _act(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> tuple[Any, Any] | None:
    """Act before a step. A closure that it calls once is called here, with its exchange, and gives step() its result."""
    every, instead = listeners(), None
    closure = next((each for each in (*args[1:2], options.get("closure")) if each is not None), None)
    if closure is not None and any(each.view.calls_once(optimizer) for each in every):
        with torch.enable_grad():
            loss = closure()
        instead = (args[0], lambda: loss, *args[2:]), {name: each for name, each in options.items() if name != "closure"}
    for each in every:
        each.check_step(optimizer, has_closure=closure is not None and instead is None)
    for each in every:
        each.before_step(optimizer)
    return instead


def _after(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    for each in listeners():
        each.after_step()


class MissingExchange:
    """A warning, once, about steps of some parameters' optimizers before any exchange of theirs: no error shows them.

    remedy: advice for the door's user.
    """

    def __init__(self, slots: Slots, network: Connection, remedy: str):
        self._slots, self._network, self._remedy = slots, network, remedy
        self._steps, self._inside, self._settled = 0, False, False

    def before_step(self, optimizer: torch.optim.Optimizer, compressor: Any) -> None:
        """Count a step without an exchange; warn of a few."""
        inside, self._inside = self._inside, True  # Horovod's step() calls another one
        if self._settled or inside or not self._network.ready or self._network.world.size == 1:
            return
        every = (each for group in optimizer.param_groups for each in group["params"] if each.grad is not None)
        own = next((each for each in every if self._slots.slot(each) is not None), None)
        if own is None:
            return
        self._steps += 1
        views = [each.view for each in listeners()]
        # No later step then looks through all parameters.
        self._settled = any(view.exchanged and not view.replaced and view.owns(own) for view in views)
        if not self._settled and self._steps == STEPS_BEFORE_WARNING:
            self._settled = True
            warn_user(
                f"the optimizer has made {STEPS_BEFORE_WARNING} steps, and no gradient was exchanged by {compressor}: the "
                f"ranks send dense gradients, or none at all. {self._remedy}"
            )

    def after_step(self) -> None:
        """Note the end of a step."""
        self._inside = False


class UnknownScaler:
    """A warning, once, about a GradScaler that steps an optimizer and was not passed as scaler=. known: the one that was."""

    def __init__(self, known: Any):
        self._known, self._warned = known, False

    def look(self, text: str = _UNKNOWN_SCALER) -> None:
        """Look for a GradScaler among the callers. Call this in a step of an optimizer if state stays between steps.

        text: of the warning.
        """
        if self._warned:
            return
        scaler = calling_scaler()
        if scaler is not None and scaler is not self._known and scaler.is_enabled():
            self._warned = True
            warn_user(text)


class Announcement:
    """What a session exchanges, said at the optimizer's step: a line on rank 0, once, and a warning if it costs accuracy, once.

    due: the spec is new. Several optimizers may step in turn: a few steps look.
    """

    def __init__(self) -> None:
        self.due, self._looks, self._said, self._warned = True, 0, False, False
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # that train none of the parameters

    def look(self, session: Any) -> None:
        """Say what is due, once the ranks have compared their optimizers. Doors without a name say nothing."""
        if not session.has_met:  # Horovod's step() ends the exchange, and calls another one
            return
        self._looks = LOOKS if self.due else self._looks - 1
        self.due = False
        if self._looks <= 0 or not session.door.name:
            return
        spec, reducer = session.spec, session.reducer
        if not self._said:
            act = (
                f"exchanges {reducer.exchanges}"
                if session.turns is None
                else f"begins with {spec}, and chooses after some steps"
            )
            inform(f"gradcomp: {session.turns or spec} over {session.door.name} {act}", session.network)
        self._said = True
        if (missed := reducer.missed) is not None and not missed.is_said:
            self._warn(session, missed.reason, missed.remedy)

    def look_without_step(self, session: Any) -> None:
        """Say what is exchanged after some exchanges without a step, which says more: weights may be moved by hand."""
        if self.due and not self._said and session.reducer.steps_done == 2 * LOOKS:
            text = f"exchanges {session.reducer.exchanges}; no optimizer has stepped yet"
            inform(f"gradcomp: {session.turns or session.spec} over {session.door.name} {text}", session.network)

    def look_at_copies(self, session: Any, optimizer: torch.optim.Optimizer) -> None:
        """Warn of an optimizer that trains copies of the parameters: the exchange does not know it, and no step shows it."""
        view = session.view
        if self._warned or view.is_told or view.replaced or not (view.exchanged and session.door.name):
            return
        is_plain = isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)
        if is_plain or optimizer in self._others:
            return
        self._others.add(optimizer)
        theirs = [each for group in optimizer.param_groups for each in group["params"]]
        shapes = sorted(tuple(each.shape) for each in view.slots.parameters.values())
        is_copy = not view.in_part and shapes == sorted(tuple(each.shape) for each in theirs)
        if is_copy and session.reducer.misses_any and not any(each.view.owns(theirs[0]) for each in listeners()):
            reason = f"{type(optimizer).__name__} trains copies of the model's parameters"
            self._warn(session, reason, "Keep the weights in float32, and compute under torch.autocast")

    def _warn(self, session: Any, reason: str, remedy: str) -> None:
        """Warn, once, that the optimizer's momentum is missed."""
        if self._warned:
            return
        self._warned = True
        seen, other = (
            ("late and sparse", "auto, which keeps no residual here")
            if session.reducer.keeps_residual
            else ("rounded to few levels", "blocks, which rounds them finely")
        )
        warn_user(
            f"{session.spec} exchanges gradients, since {reason}: the optimizer then sees them {seen}, which costs accuracy. "
            f"{remedy}, or let the spec be {other}. To go on so without this warning, write momentum=0 into the spec"
        )


def speaks() -> bool:
    """Decide whether this process says a fact that all ranks know: as the first rank of a session, or before there is one."""
    lead = [each.network.world.rank == 0 and each.slots.are_first for each in listeners() if each.network.ready]
    return not lead or any(lead)


def inform(text: str, network: Connection) -> None:
    """Log a line of rank 0 at INFO, or print it where nobody has configured a log: by default Python shows warnings only."""
    if network.world.rank:
        return
    if log.hasHandlers():
        log.info(text)
    elif log.level <= logging.INFO:  # not set by the user, or set to show it
        print(text, file=sys.stderr, flush=True)


def calling_scaler() -> Any:
    """Return the GradScaler that steps the optimizer; None if there is none. Call this in a step of an optimizer."""
    calling = (frame.f_locals.get("self") for frame in _callers(sys._getframe(1)) if frame.f_code.co_name == "step")
    return next((each for each in calling if isinstance(each, _SCALERS)), None)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def warn_user(text: str, *, of_one_rank: bool = False) -> None:
    """Warn at the user's line that called a step() or backward(), on rank 0. of_one_rank: a fact that others may not know.

    A backward pass on a GPU has threads of torch's, without a line of the user's: the main thread waits at one for them.
    """
    if not (of_one_rank or speaks()):
        return
    stacks = [[*_callers(frame)] for frame in (sys._getframe(1), *sys._current_frames().values())]
    every = [frame for stack in stacks if stack is stacks[0] or _module(stack[-1]) == "__main__" for frame in stack]
    frame = next((frame for frame in every if _module(frame).partition(".")[0] not in INNER_PACKAGES), every[0])
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"))
