"""The steps of any optimizer, and words for the user at their line."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradcomp.aliases import GradcompWarning
from gradcomp.networks import Connection

log = logging.getLogger("gradcomp")

# Packages between a user's line and a hook.
INNER_PACKAGES = ("accelerate", "gradcomp", "horovod", "lightning", "torch", "transformers")
# Older versions of torch have only the second.
_SCALERS = (getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler), torch.cuda.amp.GradScaler)

# Sessions that exchange updates, in the order in which they began to listen, which is the same on all ranks: exchanges of
# several follow one another. What a session leaves behind, as its StepExchange may be, listens no longer.
_listeners: list[weakref.ref[Any]] = []
# How often they have changed: what they know of one another is old then.
changes = 0
_closures = 0  # under way
# The steps under way, each with the frame that calls its hooks: a step that raises an error runs no hook after it.
_under_way: list[tuple[weakref.ref[torch.optim.Optimizer], FrameType]] = []
# Functions of other packages that step an optimizer only to make its state.
_MAKE_STATES = ("broadcast_optimizer_state", "_init_optim_state")
# That of torch.distributed.checkpoint which collects an optimizer's state. A new optimizer looks for all moments in it.
_COLLECT_STATES = ("_get_optim_state_dict",)


def listen(session: Any) -> None:
    """Call before(optimizer, has_closure) and after(optimizer) of a session's updates around every step, as long as it lives.

    before() returns the HiddenMomentum of a step that the session takes part in, otherwise None. Call this again where it turns
    to updates, or from them.
    """
    global changes
    _register_once()
    changes += 1
    if session not in _living():
        shares = any(number in session.updates.exchanged for number in exchanged())
        _listeners.append(weakref.ref(session, _end if shares else _listeners.remove))


def _end(reference: weakref.ref[Any]) -> None:
    """Let earlier sessions take the layers again that they have left to this one."""
    global changes
    changes += 1
    _listeners.remove(reference)


def ignore(session: Any) -> None:
    """Call a session's updates no longer."""
    global changes
    if any(each() is session for each in _listeners):
        changes += 1
        _listeners[:] = [each for each in _listeners if each() is not session]


def exchanged() -> set[int]:
    """Return the ids of all parameters whose updates a session exchanges."""
    return {number for each in _living() if each.reducer.on_updates for number in each.updates.exchanged}


def hidden(given: Any) -> set[int]:
    """Return the ids of those among them whose residual stands for this momentum of the spec; None: for the optimizer's."""
    alike = [each for each in _living() if each.reducer.on_updates and each.updates.given_momentum == given]
    return {number for each in alike for number in each.updates.optimizers.own}


def look_anew() -> None:
    """Let all sessions look at all optimizers anew, each at its next step."""
    global changes
    changes += 1


def exchanged_by_later(session: Any) -> set[int]:
    """Return the ids of the parameters that a session leaves to those that came later: two would delay updates twice.

    So it is where a model is wrapped anew and the old one lives on, also for an exchange of gradients, or where two models that
    exchange updates share layers. Under Horovod, each session has optimizers of its own.
    """
    own = session.updates.exchanged
    living = [each for each in _living() if not each.door.needs_gradients]
    later = living[living.index(session) + 1 :] if session in living else []
    takers = [each for each in later if each.reducer.on_updates or own <= each.updates.exchanged]
    return {number for each in takers for number in each.updates.exchanged}


def in_closure() -> bool:
    """Say whether a closure of a step is under way."""
    return _closures > 0


def _living() -> list[Any]:
    return [session for each in _listeners if (session := each()) is not None]


@functools.cache
def _register_once() -> None:
    """Register the hook for good: removing one fails while torch goes through all of them, and sessions end at any time."""
    register_optimizer_step_pre_hook(_uncompiled(_meet))


@functools.cache
def _uncompiled(hook: Any) -> Any:
    """Return a hook that stays out of the graph of a compiled step(). This loads what torch's optimizers load."""
    return torch.compiler.disable(hook)


def _meet(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    """Become the optimizer's last hook before a step, and its first one after it: hooks of the user's act on equal weights."""
    every_before, every_after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    before, after = _uncompiled(_before), _uncompiled(_after)
    own: dict[int, Any] | None = getattr(optimizer, "_optimizer_state_dict_pre_hooks", None)  # a wrapper may have none
    if own is not None and _give_up not in own.values():
        optimizer.register_state_dict_pre_hook(_give_up)
        optimizer.register_state_dict_post_hook(_show_in, prepend=True)
        optimizer.register_load_state_dict_post_hook(_note_loaded)
    if not every_before or next(reversed(every_before.values())) is not before:
        _drop(every_before, before)
        optimizer.register_step_pre_hook(before)
    if not every_after or next(iter(every_after.values())) is not after:
        _drop(every_after, after)
        handle = optimizer.register_step_post_hook(after)
        cast("OrderedDict[int, Any]", every_after).move_to_end(handle.id, last=False)


def _drop(hooks: dict[int, Any], hook: Any) -> None:
    for key in [key for key, each in hooks.items() if each is hook]:
        del hooks[key]


def _before(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> tuple[Any, Any] | None:
    frame = sys._getframe(2)  # beyond that of _uncompiled()
    if _under_way:
        give_up_failed()
    by_position = len(args) > 1 and callable(args[1])
    closure = args[1] if by_position else options.get("closure")
    momenta: dict[int, Any] = {}  # by the session's id
    may_begin = False  # in the closure, where auto turns to updates
    for reference in [*_listeners]:  # without a call, in every step
        if (each := reference()) is not None:
            if (momentum := each.updates.before(optimizer, closure is not None)) is not None:
                momenta[id(each)] = momentum
            may_begin |= closure is not None and each.turns is not None
    if momenta or may_begin:
        _under_way.append((weakref.ref(optimizer), frame))
    for momentum in momenta.values():  # after all have read the optimizer's settings
        momentum.hide()
    if not (momenta or may_begin) or not callable(closure):
        return None

    @functools.wraps(closure)
    def guarded() -> Any:
        """Show the momentum to the closure, also if it fails: no hook after the step then runs."""
        global _closures
        if momenta:
            _show(optimizer)
        _closures += 1
        try:
            found = closure()
        finally:
            _closures -= 1
        # auto may have turned to updates in it: what comes is a step on each rank's own gradients.
        for each in [each for each in _living() if each.turns is not None and id(each) not in momenta]:
            if (momentum := each.updates.before(optimizer, True)) is not None:
                momenta[id(each)] = momentum
        for momentum in momenta.values():
            momentum.hide()
        return found

    return ((args[0], guarded, *args[2:]), options) if by_position else (args, {**options, "closure": guarded})


def _after(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    for reference in [*_listeners]:
        if (each := reference()) is not None:
            each.updates.after(optimizer)
    for i in reversed(range(len(_under_way))):  # a step whose exchange did not begin was one that failed
        if _under_way[i][0]() is optimizer:
            del _under_way[i:]
            break


def _show(optimizer: torch.optim.Optimizer) -> None:
    """Show the optimizer's own settings to a closure."""
    give_up_failed()
    for each in _living():
        each.updates.show(optimizer)


def _give_up(optimizer: torch.optim.Optimizer) -> None:
    """Give up the steps that have failed, before a state is saved."""
    give_up_failed()


def _show_in(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Show the optimizer's own settings in a copy of its state. Its step may be under way in another thread, and goes on."""
    fills = _is_called_by(_COLLECT_STATES)
    for each in _living():
        each.updates.show_in(optimizer, saved, fills)


def give_up_failed() -> None:
    """Give up the steps that have raised an error: their frames run no more."""
    for each in [each for each in _under_way if not _is_running(each[1])]:
        _under_way.remove(each)
        if (optimizer := each[0]()) is not None:
            for session in _living():
                session.updates.give_up(optimizer)


def makes_state() -> bool:
    """Say whether a step that begins only makes the optimizer's state, for a function that saves or broadcasts it."""
    return _is_called_by(_MAKE_STATES)


def _is_called_by(names: Collection[str]) -> bool:
    return any(frame.f_code.co_name in names for frame in _callers(sys._getframe(1)))


def _note_loaded(optimizer: torch.optim.Optimizer) -> None:
    for each in _living():
        each.updates.note_loaded(optimizer)


def is_reporting_rank() -> bool:
    """Decide whether this process says a fact that all ranks know: as the first rank of a session, or before there is one."""
    lead = [each.network.world.rank == 0 and each.slots.are_first for each in _living() if each.network.ready]
    return not lead or any(lead)


def log_on_rank_0(text: str, network: Connection) -> None:
    """Log a line of rank 0 at INFO, or print it where nobody has configured a log: by default Python shows warnings only."""
    if network.world.rank:
        return
    if log.hasHandlers():
        log.info(text)
    elif log.level <= logging.INFO:  # not set by the user, or set to show it
        print(text, file=sys.stderr, flush=True)


def calling_scaler() -> Any:
    """Return the GradScaler that steps an optimizer; None if there is none. Call this in a step of an optimizer."""
    calling = (frame.f_locals.get("self") for frame in _callers(sys._getframe(1)) if frame.f_code.co_name == "step")
    return next((each for each in calling if isinstance(each, _SCALERS)), None)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_running(frame: FrameType) -> bool:
    """Say whether a frame is in the stack of any thread. Python refuses to clear such a one."""
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _is_users(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] not in INNER_PACKAGES


def warn_user(text: str) -> None:
    """Warn at the user's line that called a step() or backward(), on rank 0.

    A backward pass on a GPU has threads of torch's, without a line of the user's: the main thread waits at one for them.
    """
    if not is_reporting_rank():
        return
    every = [*_callers(sys._getframe(1))]
    if not any(map(_is_users, every)):  # other stacks may change while they are looked at: no sooner than they must be
        stacks = [[*_callers(frame)] for frame in sys._current_frames().values()]
        every += [frame for stack in stacks if _module(stack[-1]) == "__main__" for frame in stack]
    frame = next(filter(_is_users, every), every[0])
    warnings.warn_explicit(text, GradcompWarning, frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"))
