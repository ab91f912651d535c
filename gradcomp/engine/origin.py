"""The origin of the ranks' moments: the optimizer that they belong to, and its state, which may be replaced in mid-training."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from gradcomp.engine.optimizer_steps import warn_user

_ANOTHER = (
    "{name} is new, or its state is, but the update that it steps with holds the moments of the one before. They begin anew "
    'after this step. To begin anew at once, call change("SPEC,momentum=0") before, and change("SPEC") after the first step'
)
_MAXIMIZE = (
    "maximize of {name} has changed in mid-training, but the residual and the moments hold gradients of the other sign. Set it "
    "back, and negate the loss from now on instead: (-loss).backward() moves the weights alike"
)


# In the groups of a saved optimizer: its moments were not in its state, but in the ranks'.
MARK = "gradcomp"

# The origins, by their keys, of moments that optimizers had and ranks have. Another session does not have them.
_holders: weakref.WeakKeyDictionary[torch.optim.Optimizer, object] = weakref.WeakKeyDictionary()


class Origin:
    """The optimizer that the ranks' moments and residuals belong to, and the state that it had in its last step.

    torch gives an optimizer another state where one is loaded: a rollback, unless state_dict() has just returned it, to have
    another learning rate, say. The state of an optimizer without moments of its own is an empty dict, also after clear(). But a
    cleared dict has no table, and a dict that had an entry has one.

    generation: the numbers of changes, of states that were loaded and of all. holds_moments: the ranks have them, and not the
    optimizer. begins_without: a state was saved without them, or another session had them, and nothing has them. broadcasts:
    hvd.broadcast_optimizer_state() has made a step, and asks for the state next. It sends the settings of a state with entries
    only, so this one gets an entry, which goes nowhere.
    """

    _SIZES: ClassVar[Mapping[type, int]] = {kind: kind().__sizeof__() for kind in (dict, defaultdict)}

    def __init__(self) -> None:
        self.generation = 0, 0
        self.holds_moments = self.begins_without = self.broadcasts = False
        self._key = object()  # outlives the origin
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._state: Any = None
        self._saved: Any = None  # the state in the result of state_dict(), since the last step
        self._reloads = False
        self._signs: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[int]] = weakref.WeakKeyDictionary()

    def compare(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Return whether an optimizer, or its state, is another one than in the last step."""
        if self._optimizer is None or optimizer is None:
            return False
        state, (loaded, changed) = optimizer.state, self.generation
        is_other, is_loaded = self._optimizer() is not optimizer, state is not self._state
        if is_loaded and self._reloads and not is_other:
            return False
        if not (is_other or is_loaded or state.__sizeof__() == self._SIZES.get(type(state))):
            return False
        self.generation = loaded + (is_loaded and not is_other), changed + 1
        self._note(optimizer)
        return True

    def note_step(self, optimizer: torch.optim.Optimizer, holds_moments: bool) -> None:
        """Note an optimizer that is about to step. holds_moments: its update does."""
        if self.compare(optimizer) and holds_moments:
            warn_user(_ANOTHER.format(name=type(optimizer).__name__))
        self._take_over(optimizer, False)
        self._note(optimizer)

    def expect_marks(self, optimizer: torch.optim.Optimizer) -> None:
        """Let Horovod broadcast the marks of rank 0's state, if that alone was loaded: it knows no option that others lack.

        Ranks that have loaded nothing make a step first.
        """
        for group in optimizer.param_groups:
            group.setdefault(MARK, False)

    def note_moments(self, optimizer: torch.optim.Optimizer, are_loaded: bool, has_some: bool) -> None:
        """Note that the ranks go on with moments. are_loaded: with those of gradcomp's state. Forget the marks of a saved one.

        has_some: the optimizer has some. Beside a mark they are no saved ones: Horovod's step before a broadcast makes them of
        the weight decay.
        """
        marks = [group.pop(MARK, False) for group in optimizer.param_groups]
        self.begins_without |= any(marks) and not (are_loaded or self._reloads)
        self._take_over(optimizer, are_loaded or has_some)
        self.holds_moments, _holders[optimizer] = True, self._key

    def leave(self) -> None:
        """Note that the ranks have no moments from now on: the optimizer has its own."""
        self.holds_moments = False
        for optimizer in [each for each, key in _holders.items() if key is self._key]:
            del _holders[optimizer]

    def _take_over(self, optimizer: torch.optim.Optimizer, are_known: bool) -> None:
        """Note whether moments that another session has of an optimizer are lost."""
        if _holders.get(optimizer, self._key) is not self._key:
            self.begins_without |= not are_known
            del _holders[optimizer]

    def check_sign(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that has begun to maximize, or to minimize, in mid-training."""
        signs = [sign_of(group) for group in optimizer.param_groups]
        before = self._signs.get(optimizer, signs)
        if signs[: len(before)] != before:
            raise RuntimeError(_MAXIMIZE.format(name=type(optimizer).__name__))
        self._signs[optimizer] = signs

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._watched:
            self._watched.add(optimizer)
            for group in optimizer.param_groups:
                if not group.get(MARK, True):  # nothing was loaded
                    del group[MARK]
            optimizer.register_state_dict_post_hook(partial(_note_saved, weakref.ref(self)))
            optimizer.register_load_state_dict_pre_hook(partial(_note_loaded, weakref.ref(self)))
        self._optimizer, self._state, self._saved, self._reloads = weakref.ref(optimizer), optimizer.state, None, False
        self.broadcasts = False
        entries: Any = optimizer.state
        entries[self] = None
        del entries[self]

    def forget(self) -> None:
        """Take the next step's optimizer and state for those that the moments belong to: the moments were loaded, too."""
        self._optimizer = self._state = None


def _note_saved(origin: weakref.ref[Origin], optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    if (found := origin()) is not None:
        found._saved = state["state"]
        if found.broadcasts:
            state["state"][state["param_groups"][0]["params"][0]] = {"entry of gradcomp": 0}
            found.broadcasts = False
        elif found.holds_moments:
            for group in state["param_groups"]:
                group[MARK] = True


def _note_loaded(origin: weakref.ref[Origin], optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    if (found := origin()) is not None:
        found._reloads = found._saved is not None and state["state"] is found._saved


def sign_of(group: Mapping[str, Any]) -> int:
    """Return the sign with which a group's gradients enter its steps."""
    return -1 if group.get("maximize") else 1
