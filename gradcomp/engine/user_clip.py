"""Clips of the user's between the exchange and the optimizer's step: told from other changes, and what is known of them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gradcomp import saved
from gradcomp.engine.optimizer_steps import calling_scaler, warn_user

# The first steps, of which all layers are looked at. Later that begins in the step after one in which a sample changed.
TRIAL = 8
# Steps without the clip, although updates were longer than the bound, after which it is forgotten.
ABSENT = 8
# Two factors, and two bounds, that are equal but for rounding. Bounds that differ by more than the third are of a clip that
# changes. So many of these changes on end, up and down, are of no clip by a norm.
SAME_FACTOR, SAME_BOUND, DRIFT, DRIFTS = 1e-5, 1e-3, 2e-2, 3
# A division by a count, times a number of ranks up to this, is a ratio of integers.
RATIO, RANKS = 2e-7, 16
# Below this factor most numbers are near a ratio of integers by chance, and a clip would be taken for a division.
SMALLEST_RATIO = 1e-2
# So many factors on end are none of a clip's. After one more, the same clip has had factors of both sorts.
FACTORS, MIXES = 2, 3

_UNDERSTOOD = (
    "gradcomp: the gradients were clipped to {bounds} between their exchange and step(). Nothing needs to be done: they hold "
    "{content}, so that clip is undone, and in its place each rank's own gradients are cut to {where}, before their exchange, "
    "from the next step on; layers that turn out to have a clip of their own get its norm. clip_grad_norm_() returns an "
    "update's norm; that of this rank's gradients is stats()['grad_norm']: to decide by it, as to leave out a step, take its "
    "mean over the ranks first"
)
_STAYS = (
    ". Updates without momentum are seldom longer than this norm, and do not show whether you still clip: once you do not, "
    "gradients stay cut"
)
_LAGS = ". Where the clip cuts most steps, SGD trains slower so at first than without compression; with spec blocks it does not"
_LEAPS = (
    "the gradients were multiplied by one factor between their exchange and step(), and norms of {bounds} were left in the "
    "last steps. They hold {content}, and a clip to a norm that leaps is not understood. {outcome}. In place of this, clip by "
    "norm_type=2, to a norm that changes slowly; and divide the loss by a number, in place of the gradients, before backward()"
)
UPDATE_CHANGED = (
    "the gradients were changed between their exchange and step(), and not each layer by one factor up to 1, as "
    "clip_grad_norm_() does, which is understood. gradcomp has taken the momentum over, and they hold {content}. {outcome}"
)
REFUSED = (
    "Clip by norms. Change gradients otherwise, as a clip of values does, or a mask, before their exchange: call "
    "parameter.register_hook(lambda grad: grad * mask) once, and remove the later change. Or take the spec blocks, or "
    "write momentum=0 (under auto, loss=low): the exchange is then of gradients"
)
FALLS_BACK = (
    "From the next step on the exchange is of gradients, which may be changed, and SGD applies its momentum itself, from 0 on. "
    "That can cost accuracy: with spec blocks it does not. Or change gradients before their exchange, and call "
    "parameter.register_hook(lambda grad: grad * mask) once. To go on so without this warning, write momentum=0 into the spec"
)
_MIXES = (
    "the gradients were divided, for example by a count of passes or tokens, and clipped between their exchange and step(). "
    "They hold {content}, where the two cannot be told apart. {outcome}. In place of this, divide the loss by the count before "
    "backward(): the clip is then understood"
)
_SKIPS = (
    "the gradients were clipped between their exchange and step() to a norm of {bound:.3g}, and in some steps they were not, "
    "although longer. They hold {content}, and a clip in some steps only is not understood. {outcome}"
)
_LEAVES = (
    "From the next step on the exchange is of gradients, and SGD applies its momentum itself, from 0 on. That can cost some "
    "accuracy"
)
_APPLIES = "SGD applies the factor, and on Adam's step it has no effect"
_DROPS = (
    "From the next step on no gradient is cut before its exchange. SGD applies all factors after it, and on Adam's step they "
    "have no effect"
)
UNSCALED = (
    "the gradients were changed between their exchange and step(), which looks like GradScaler.unscale_(): a GradScaler steps "
    "the optimizer, and gradcomp does not know it. Pass scaler=scaler where you pass the spec. gradcomp has taken the momentum "
    "over, and they hold {content}, and have no loss scale to take out. With scaler= they have it, and a clip after unscale_() "
    "is understood, too"
)
# What a state holds of a clip beside its bound: the names there, and the attributes.
_SAVED = {name.lstrip("_"): name for name in ("factor", "is_scaling", "is_new", "_last", "_absent")}
CONTENTS = {
    "direction": "Adam's directions, with a length that says nothing about the gradient's",
    "velocity": "SGD's velocity, which is several times as long as the gradient",
    "gradient": "entries of many steps' gradients",
}


class Comparison(NamedTuple):
    """A step's updates at their delivery, and before the optimizer steps, in numbers.

    changed: some entries were. is_uniform: each layer's by one factor, of at most 1. is_regular: all layers of a clip by the
    same factor. shrinks: no entry is longer than before, or has become 0. factor, norm: of all together; the norm is -1 where
    only a sample was looked at. rounding: the largest change that counts as none. squares: by layer, before and after.
    """

    changed: float
    is_uniform: float
    is_regular: float
    shrinks: float
    factor: float
    norm: float
    rounding: float
    squares: tuple[Sequence[float], Sequence[float]]

    def of(self, layers: Sequence[int]) -> tuple[float, float]:
        """Return the factor of some layers, and the norm of their update."""
        old, new = (sum([own[each] for each in layers]) for own in self.squares)
        return (math.sqrt(new / old) if old else 1.0), math.sqrt(old)


class UserClip:
    """A clip by a norm of some layers, as clip_grad_norm_() makes it.

    layers: their numbers. bound: the norm that it leaves; None until a clip is known. factor: the last one on updates.
    is_scaling: the factor is none of a clip's, but one over a number of passes or tokens, for example. is_new: nothing has been
    done about the clip. delivered, noted: the time of the last factor's update, and of its note. squares: of this rank's last
    gradients before a cut, added up. whole: the norm that is left of these layers and of others, in another model or with
    another optimizer; 0 where the clip has no others. near: a clip that had the same factor when both acted last. family: all
    clips of the model's. skips: it acts in some steps only.
    """

    def __init__(self, layers: Iterable[int], family: UserClips) -> None:
        self.family = family
        self.layers = [*layers]
        self.bound: float | None = None
        self.factor, self.is_scaling, self.is_new = 1.0, False, True
        self.near: UserClip | None = None
        self.delivered = self.noted = self.whole = 0.0
        self.squares: Tensor | None = None
        self.leaps: list[float] = []  # the last norms, where they are no clip's
        self._last = self._absent = 0.0
        self._bounds: list[float] = []  # the last ones
        self._factors, self.skips = 0, False  # the factors on end that are none of a clip's

    def save(self) -> dict[str, Any]:
        """Copy all that the next steps depend on, as numbers."""
        own = {name: float(getattr(self, attribute)) for name, attribute in _SAVED.items()}
        more: dict[str, Any] = {"bound": self.bound or 0.0, "layers": self.layers}
        return own | more | {name: each for name, each in (("bounds", self._bounds), ("factors", self._factors)) if each}

    @classmethod
    def of(cls, state: Mapping[str, Any], family: UserClips) -> UserClip:
        """Make a clip of what save() copied."""
        numbers = {name: saved.number(state, name) for name in ("bound", *_SAVED)}
        clip = cls(saved.read_ints(state, "layers"), family)
        clip.bound = numbers["bound"] or None
        bounds = saved.sequence(state, "bounds") if "bounds" in state else []
        clip._bounds = [saved.number({"bounds": each}, "bounds") for each in bounds]
        clip._factors = saved.read_int({"factors": 0, **state}, "factors", most=MIXES)
        for name, attribute in _SAVED.items():
            setattr(clip, attribute, type(getattr(clip, attribute))(numbers[name]))
        return clip

    @property
    def is_known(self) -> bool:
        return self.bound is not None or self.is_scaling

    @property
    def mixes(self) -> bool:
        """True if factors came that are none of a clip's, beside a clip or leaping: none of them is known from then on."""
        return self._factors == MIXES

    def acts_with(self, other: UserClip) -> bool:
        """Decide whether another clip is the same call of clip_grad_norm_(): equal factors in the same step."""
        same = abs(other.factor / self.factor - 1) <= SAME_FACTOR
        return same and other.noted >= self.delivered and self.noted >= other.delivered

    def take(self, other: UserClip) -> None:
        """Take the layers of another clip, which is the same call."""
        self.layers = sorted(self.layers + other.layers)
        if self.bound is not None and other.bound is not None:
            self.bound, self._last = math.hypot(self.bound, other.bound), math.hypot(self._last, other._last)
        self.squares, self._bounds, self._factors = None, [], max(self._factors, other._factors)

    def note_absent(self, norm: float) -> None:
        """Note a step without the clip, and the norm of its update."""
        if self.bound is not None and norm > (1 + SAME_BOUND) * self.bound:
            self._absent += 1
            if self._absent == ABSENT:
                self.bound, self.is_new, self._absent = None, True, 0

    def note(self, factor: float, norm: float, is_whole: bool, delivered: float = 0.0) -> bool:
        """Note a clip of an update of this norm. Return whether it is no mere factor.

        is_whole: it is of the whole model, and not the part of a clip that one of several optimizers has, which varies.
        delivered: the update's time.
        """
        bound, was_known, is_whole = factor * (norm + 1e-6), self.bound is not None, is_whole and not self.whole
        same = self._last > 0 and abs(factor / self.factor - 1) <= SAME_FACTOR
        steady = self._last > 0 and abs(bound / self._last - 1) <= SAME_FACTOR
        drifts = is_whole and self._last > 0 and abs(bound / self._last - 1) > DRIFT
        moves = was_known and len(self._bounds) > 1 and abs(self._bounds[-1] / self._bounds[-2] - 1) > SAME_BOUND
        self._bounds = [*self._bounds[-DRIFTS:], bound]
        # Norms may be equal by chance in two steps, and factors, and a factor may be a ratio: then it is what it was.
        same, is_ratio = same and not moves, is_whole and not moves and _is_ratio(factor)
        is_factor = (same or is_ratio) and (self.is_scaling or not steady)
        is_one = len(self.family.every) == 1  # few entries under several clips may look like one with other factors
        self.leaps = self._bounds if is_one and is_whole and not (same or is_ratio) and _leap(self._bounds) else []
        self.skips = is_one and was_known and self._absent > 0 and abs(bound / self._last - 1) <= SAME_BOUND
        mixes = is_ratio and drifts if was_known else not (is_factor or steady) and (self._factors == FACTORS or drifts)
        if self.mixes or self.leaps or (is_one and mixes and (was_known or self._factors)):
            self._factors = MIXES
        else:
            self._factors = min(self._factors + 1, FACTORS) if is_factor else 0
        self.is_scaling = is_factor or self.mixes or bool(self.leaps)
        self.factor, self._last, self._absent = factor, bound, 0
        self.delivered, self.noted = delivered, time.perf_counter()
        self.bound = None if self.is_scaling else bound
        return was_known and not (self.is_scaling or drifts)


class UserClips:
    """All clips of a model's layers. Layers that one factor cuts together are of one clip, and each layer is of one.

    every: the clips, at first one of all layers. moved: layers that the last step has given to another clip.
    """

    def __init__(self, layers: int) -> None:
        self._count, self.every = layers, [UserClip(range(layers), self)]
        self.moved: list[int] = []
        self._steps, self._suspects, self.has_said, self._has_warned = 0, False, False, False
        self._seen: set[int] = set()  # layers that had an update when layers were divided

    def save(self) -> dict[str, Any]:
        """Copy all that the next steps depend on, as numbers."""
        every = [
            each.save() | {"near": 1 + self.every.index(each.near) if each.near in self.every else 0} for each in self.every
        ]
        return {"every": every, "steps": float(self._steps), "suspects": float(self._suspects), "seen": sorted(self._seen)}

    def load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check what save() copied. Return a function that loads it, and cannot fail. Nothing is known from an empty state."""
        new = UserClips(self._count)
        if state:
            new.every = [UserClip.of(each, self) for each in saved.sequence(state, "every")]
            if sorted(i for each in new.every for i in each.layers) != [*range(self._count)]:  # of another model's layers
                return self.load({})
            for clip, each in zip(new.every, state["every"], strict=True):
                near = saved.read_int(each, "near", most=len(new.every))
                clip.near = new.every[near - 1] if near else None
            new._steps, new._suspects = int(saved.number(state, "steps")), bool(saved.number(state, "suspects"))
            new._seen = {*map(int, saved.sequence(state, "seen"))} if "seen" in state else set()
        said = self.has_said or any(each.bound is not None for each in new.every)  # the training that saved it did

        def load() -> None:
            self.__dict__.update(new.__dict__, has_said=said)
            for each in self.every:
                each.family = self

        return load

    @property
    def watches(self) -> bool:
        """True if the next step looks at all layers."""
        return self._steps < TRIAL or self._suspects or self.is_known

    @property
    def is_known(self) -> bool:
        return any(each.is_known for each in self.every)

    @property
    def bounded(self) -> list[UserClip]:
        """The clips to a norm that is known."""
        return [each for each in self.every if each.bound is not None]

    def end_step(self) -> None:
        """Count a step."""
        self._steps += 1

    def suspect(self) -> None:
        """Look at all layers from the next step on: a sample of some has factors below 1."""
        self._suspects = True

    def note(self, step: Comparison, content: str, is_whole: bool, delivered: float = 0.0) -> bool:
        """Note the factors and norms of a step's update. content: of updates, in words. The others: see UserClip.note().

        Return True if SGD is to apply its momentum itself, since its clip is not understood. All clips are forgotten then.
        """
        self.moved = []
        if step.changed and not step.is_regular:
            self._divide(step)
        is_clip, noted = False, []  # type: bool, list[UserClip]
        leaps: list[float] = []
        for clip in self.every:
            factor, norm = (step.factor, step.norm) if len(self.every) == 1 else step.of(clip.layers)
            if abs(factor - 1) > step.rounding:
                is_clip |= clip.note(factor, norm, is_whole, delivered)
                leaps = clip.leaps or leaps
                noted.append(clip)
            else:
                clip.note_absent(norm)
                is_clip |= clip.bound is not None
        if noted and (noted[0].mixes or noted[0].skips) and self._gives_up(noted[0], content):
            return True
        self._merge(noted)
        if is_clip and not self.has_said:
            self.has_said = True
            self._say(content, is_whole)
        if leaps and not self._has_warned:
            self._has_warned = True
            warn_user(_LEAPS.format(bounds=_listed(leaps), content=content, outcome=_APPLIES))
        return False

    def _gives_up(self, clip: UserClip, content: str) -> bool:
        """Warn of a clip that is not understood. Return whether the momentum is left to SGD."""
        leaves = content == CONTENTS["velocity"]
        if clip.mixes and (leaves or not self._has_warned):
            self._has_warned, text = True, _LEAPS if clip.leaps else _MIXES
            warn_user(text.format(bounds=_listed(clip.leaps), content=content, outcome=_LEAVES if leaves else _DROPS))
        elif leaves:
            warn_user(_SKIPS.format(bound=clip.bound, content=content, outcome=_LEAVES))
        if leaves:
            self.every = [UserClip(range(self._count), self)]
        return leaves

    def _merge(self, noted: list[UserClip]) -> None:
        """Make one of clips that have had one factor twice on end, each time that both acted. Once may be by chance."""
        noted.sort(key=lambda clip: clip.factor)
        for one, other in itertools.pairwise(noted):
            same = abs(other.factor / one.factor - 1) <= SAME_FACTOR
            if same and one.near is other:
                other.take(one)
                self.every.remove(one)
            elif same or one.near in noted:
                one.near = other if same else None

    def _divide(self, step: Comparison) -> None:
        """Divide clips with several factors: the longest part that was cut stays, others go to a clip of their factor.

        An update without entries shows nothing: its layer then goes with its neighbour, until it has shown something.
        """
        factors = [step.of([layer])[0] for layer in range(self._count)]
        self._seen |= {layer for layer, square in enumerate(step.squares[0]) if square}
        clip_of = {layer: clip for clip in self.every for layer in clip.layers}
        before, acting = dict(clip_of), []  # type: dict[int, UserClip], list[tuple[float, UserClip]]
        leaving: list[list[int]] = []
        for clip in self.every:
            parts: list[list[int]] = []
            for layer in sorted([each for each in clip.layers if step.squares[0][each]], key=factors.__getitem__):
                if parts and abs(factors[layer] / factors[parts[-1][0]] - 1) <= step.rounding:
                    parts[-1].append(layer)
                else:
                    parts.append([layer])
            cut = [part for part in parts if factors[part[0]] < 1 - step.rounding]
            stays = max(cut or parts, key=lambda part: step.of(part)[1], default=None)
            acting.append((1.0 if stays is None else factors[stays[0]], clip))
            leaving += [part for part in parts if part is not stays]
        for part in leaving:
            factor = factors[part[0]]
            is_cut = factor < 1 - step.rounding
            same = (each for own, each in acting if (is_cut or each.bound is None) and abs(own / factor - 1) <= step.rounding)
            if (clip := next(same, None)) is None:  # type: ignore[assignment]
                clip = UserClip([], self)
                acting.append((factor, clip))
            clip_of.update(dict.fromkeys(part, clip))
        seen = sorted(self._seen)
        for layer in {*range(self._count)} - self._seen:
            clip_of[layer] = clip_of[next((each for each in reversed(seen) if each < layer), seen[0])]
        self.moved = [layer for layer in range(self._count) if clip_of[layer] is not before[layer]]
        every = [clip for _, clip in acting]
        layers: dict[int, list[int]] = {id(clip): [] for clip in every}
        for layer in range(self._count):
            layers[id(clip_of[layer])].append(layer)
        for clip in every:
            clip.layers = layers[id(clip)]
        self.every = [clip for clip in every if clip.layers]

    def _say(self, content: str, is_whole: bool) -> None:
        known = self.bounded
        is_whole &= len(known) == 1 and len(known[0].layers) == self._count
        norms = [f"{each.whole or each.bound:.3g}" for each in known]
        where = "this norm, over all layers" if len(known) == 1 else "these norms, each over its layers"
        if known[0].whole:
            where += ", also those of another model or optimizer"
        elif not is_whole:
            norms = [f"{norm} ({len(each.layers)} of {self._count} layers)" for norm, each in zip(norms, known, strict=True)]
            where = where.replace("all layers", "these layers")
        text = ("a norm of " if len(norms) == 1 else "norms of ") + ", ".join(norms[:3]) + (len(norms) > 3) * " and others"
        more = {CONTENTS["gradient"]: _STAYS, CONTENTS["velocity"]: _LAGS}.get(content, "")
        warn_user(_UNDERSTOOD.format(bounds=text, content=content, where=where) + more)


def _leap(bounds: Sequence[float]) -> bool:
    """Decide whether bounds change up and down, by much each time. A schedule's go one way."""
    every = sum(abs(new / old - 1) > DRIFT for old, new in itertools.pairwise(bounds)) == DRIFTS
    return every and [*bounds] not in (sorted(bounds), sorted(bounds, reverse=True))


def _listed(norms: Iterable[float]) -> str:
    return ", ".join(f"{each:.3g}" for each in norms)


def _is_ratio(factor: float) -> bool:
    """Decide whether a factor is a number of ranks over a count."""
    return factor >= SMALLEST_RATIO and any(
        abs(n / factor - round(n / factor)) <= RATIO * n / factor for n in range(1, RANKS + 1)
    )


def scaler_is_unknown() -> bool:
    """Decide whether a GradScaler steps the optimizer. Call this where its scale is unknown: its factor is no clip's."""
    scaler = calling_scaler()
    return scaler is not None and scaler.is_enabled()
