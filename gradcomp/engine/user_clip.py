"""A clip of the user's between the exchange and the optimizer's step: told from other changes, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradcomp import saved
from gradcomp.engine.optimizer_steps import calling_scaler, warn_user

# The first steps, of which all layers are looked at. Later that begins in the step after one in which a sample changed.
TRIAL = 8
# Steps without the clip, although updates were longer than the bound, after which it is forgotten.
ABSENT = 8
# Two factors, and two bounds, that are equal but for rounding. Bounds that differ by more than the third are of a clip that
# changes. So many of these on end are of no clip by a norm.
SAME_FACTOR, SAME_BOUND, DRIFT, DRIFTS = 1e-5, 1e-3, 2e-2, 3
# A division by a count, times a number of ranks up to this, is a ratio of integers.
RATIO, RANKS = 2e-7, 16

_UNDERSTOOD = (
    "gradcomp: the gradients were clipped to a norm of {bound:.3g} between their exchange and step(). They hold {content}, so "
    "that clip is undone. In its place each rank's own gradients are cut to this norm, over all layers, before their exchange, "
    "from the next step on. clip_grad_norm_() returns an update's norm; that of the gradients is stats()['grad_norm']"
)
_STAYS = (
    ". Updates without momentum are seldom longer than this norm, and do not show whether you still clip: once you do not, "
    "gradients stay cut"
)
_DRIFTS = (
    "the gradients were multiplied by one factor between their exchange and step(), and norms of {bounds} were left in the "
    "last steps. This is no clip to a norm that stays: SGD applies the factor, and for Adam it has no effect. Clip by "
    "norm_type=2, to a norm of gradients, since clip_grad_norm_() returns an update's; divide the loss by a count before "
    "backward(); and clip the model of each DDP alone"
)
# What a state holds of a clip beside its bound: the names there, and the attributes.
_SAVED = {name.lstrip("_"): name for name in ("factor", "is_scaling", "is_new", "_last", "_steps", "_absent", "_suspects")}
CONTENTS = {
    "direction": "Adam's directions, with a length that says nothing about the gradient's",
    "velocity": "SGD's velocity, which is several times as long as the gradient",
    "gradient": "entries of many steps' gradients",
}


class UserClip:
    """A clip by a norm of all layers, as clip_grad_norm_() makes it.

    bound: the norm that it leaves; None until a clip is known. factor: the last one on updates. is_scaling: the factor is none
    of a clip's, but one over a number of passes or tokens, for example. is_new: nothing has been done about the clip.
    """

    def __init__(self) -> None:
        self.bound: float | None = None
        self.factor, self.is_scaling, self.is_new = 1.0, False, True
        self._last = self._steps = self._absent = 0.0
        self._suspects = self._said = False
        self._content = ""
        self._drifts: list[float] = []

    def save(self) -> dict[str, Any]:
        """Copy all that the next steps depend on, as numbers."""
        own = {name: float(getattr(self, attribute)) for name, attribute in _SAVED.items()}
        return own | {"bound": self.bound or 0.0} | ({"drifts": self._drifts} if self._drifts else {})

    def load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check what save() copied. Return a function that loads it, and cannot fail. Nothing is known from an empty state."""
        numbers = {name: saved.number(state, name) for name in ("bound", *_SAVED)} if state else UserClip().save()
        drifts = saved.sequence(state, "drifts") if "drifts" in state else []
        drifts = [saved.number({"drifts": each}, "drifts") for each in drifts]

        def load() -> None:
            self.bound, self._drifts = numbers["bound"] or None, drifts
            self._said |= self.bound is not None  # the training that saved it did
            for name, attribute in _SAVED.items():
                setattr(self, attribute, type(getattr(self, attribute))(numbers[name]))

        return load

    @property
    def watches(self) -> bool:
        """True if the next step looks at all layers."""
        return self._steps < TRIAL or self._suspects or self.is_known

    @property
    def is_known(self) -> bool:
        return self.bound is not None or self.is_scaling

    def end_step(self) -> None:
        """Count a step."""
        self._steps += 1

    def suspect(self) -> None:
        """Look at all layers from the next step on: a sample of some has one factor."""
        self._suspects = True

    def note_absent(self, norm: float) -> None:
        """Note a step without a clip, and the norm of its update."""
        self._say()
        if self.bound is not None and norm > (1 + SAME_BOUND) * self.bound:
            self._absent += 1
            if self._absent == ABSENT:
                self.bound, self.is_new, self._absent = None, True, 0

    def note(self, factor: float, norm: float, content: str, is_whole: bool = True) -> None:
        """Note a clip of an update of this norm. content: of updates, in words.

        is_whole: it is of the whole model, and not the part of a clip that one of several optimizers has, which varies.
        """
        bound, self._content = factor * (norm + 1e-6), content
        same = self._last > 0 and abs(factor / self.factor - 1) <= SAME_FACTOR
        steady = self._last > 0 and abs(bound / self._last - 1) <= SAME_FACTOR
        drifts = is_whole and self._last > 0 and abs(bound / self._last - 1) > DRIFT
        self._drifts = [*self._drifts[-DRIFTS:], bound] if drifts else []
        is_ratio = is_whole and _is_ratio(factor)
        # Norms may be equal by chance in two steps, and a factor may be a ratio: then it is what it was.
        self.is_scaling = ((same or is_ratio) and (self.is_scaling or not steady)) or len(self._drifts) >= DRIFTS
        self.factor, self._last, self._absent = factor, bound, 0
        if not (self.is_scaling or drifts):
            self._say()  # from the second one on: it is no mere factor
        self.bound = None if self.is_scaling else bound
        if len(self._drifts) == DRIFTS and not (same or is_ratio):
            warn_user(_DRIFTS.format(bounds=", ".join(f"{each:.3g}" for each in self._drifts)))

    def _say(self) -> None:
        if self.bound is not None and self._content and not self._said:
            self._said = True
            stays = _STAYS if self._content == CONTENTS["gradient"] else ""
            warn_user(_UNDERSTOOD.format(bound=self.bound, content=self._content) + stays)


def _is_ratio(factor: float) -> bool:
    """Decide whether a factor is a number of ranks over a count."""
    return any(abs(n / factor - round(n / factor)) <= RATIO * n / factor for n in range(1, RANKS + 1))


def scaler_is_unknown() -> bool:
    """Decide whether a GradScaler steps the optimizer. Call this where its scale is unknown: its factor is no clip's."""
    scaler = calling_scaler()
    return scaler is not None and scaler.is_enabled()
