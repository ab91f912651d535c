"""Changes of updates before the optimizer steps, found by samples of entries: clips are undone, others refused or warned of.

On a CPU a change is found in its own step. On a GPU it is found one step later, so that no step waits for the device.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.engine.bucket import Bucket
from gradcomp.engine.changed_gradients import grad_of
from gradcomp.engine.optimizer_steps import warn_user
from gradcomp.engine.slots import Slot
from gradcomp.engine.stages.stage import Copy, squares_of, tensor_on
from gradcomp.engine.user_clip import (
    CONTENTS,
    FALLS_BACK,
    REFUSED,
    SAME_FACTOR,
    UNSCALED,
    UPDATE_CHANGED,
    Comparison,
    UserClip,
    UserClips,
    scaler_is_unknown,
)
from gradcomp.native.extension import LARGEST
from gradcomp.native.memory import HostCopy, Memory

# The content of updates: the optimizer's momentum, or gradients that error feedback has kept.
Holds = Literal["direction", "velocity", "gradient"]
# The most entries of an updated layer in a sample: sparse updates are mostly 0. The layers: the largest, and others in turn.
UPDATED_ENTRIES, LAYERS = 4096, 4
# A change by less than this share is rounding: by unscaling, for example. The first is of float32, the second of other types.
SMALLEST_CHANGE = 1e-4, 1e-2


class Clipped(NamedTuple):
    """Clips of the updates that are known. factors: float64, by layer, 1 where there was none in this step.

    new: by layer, 1 where a clip is the first one, and 0 elsewhere; None where all are as before.
    """

    factors: Tensor
    new: Tensor | None


class UpdateSample:
    """Entries of some layers' updates, without the loss scale, from their delivery to the optimizer's step.

    A change of layers by one factor below 1 is a clip. Another change of directions is refused, one of a velocity is warned of.
    If it makes entries smaller, as a clip of values does, the momentum is left to the optimizer: a velocity is longer than a
    gradient.

    clips: the user's. are_changed: velocities were changed by more than a clip; no clip is looked for then. is_scaled: the
    gradients have the loss scale until a scaler takes it out. siblings: the samples of all optimizers of the model.
    """

    def __init__(self, slots: Sequence[Slot]):
        self._memory = Memory()
        self._warned = self.are_changed = self.is_scaled = False
        self._slots = sorted(slots, key=lambda slot: -slot.layer.size)
        devices = dict.fromkeys(slot.layer.device for slot in slots)
        # Those with entries, in the order of all figures by layer.
        self._layers = [s for device in devices for s in slots if s.layer.size and s.layer.device == device]
        self.clips = UserClips(len(self._layers))
        self._number_of = {slot.name: number for number, slot in enumerate(self._layers)}
        self._kept: list[tuple[Slot, Tensor]] = []
        self.siblings: Sequence[UpdateSample] = (self,)
        self._buckets: Sequence[Bucket] = ()
        self._squares: Tensor | None = None  # of each layer's update
        self._clips: tuple[list[int], Tensor] | None = None  # the number of each layer's clip
        self._norms: tuple[Tensor, Tensor] | None = None  # the squares of the update, and of this rank's longest gradient
        self._longest: Tensor | None = None  # its squares by layer
        self._own: Tensor | None = None  # the same of this rank's last gradient that was measured
        self._last: Tensor | None = None  # the factor of this step's clip
        self._delivered = self._compared = 0.0  # the times of the last update, and of its last comparison
        self._names: list[tuple[list[int], Collection[str]]] = []  # the layers of each clip to a norm, and their names
        self._order: tuple[tuple[str, ...], Tensor] | None = None  # of the buckets' layers
        self._late: tuple[Holds, HostCopy] | None = None
        self._turn, self._suspected = 0, None  # type: int, float | None

    def save(self, copy: Copy | None = None) -> dict[str, Any]:
        """Copy what is known of the user's clips. copy: copies this rank's own part; None leaves it out."""
        state: dict[str, Any] = {"clips": self.clips.save(), "turn": self._turn, "are_changed": int(self.are_changed)}
        if self._late is not None:
            state |= {"holds": self._late[0], "numbers": self._late[1].all()}
        if copy is not None and self._longest is not None:
            state["squares"] = copy(self._longest)
        return state

    def load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check what save() copied. Return a function that loads it, and cannot fail. An empty state forgets the clips."""
        clips, turn = self.clips.load(saved.table_or_empty(state, "clips")), saved.read_int({"turn": 0, **state}, "turn")
        are_changed = bool(saved.read_int({"are_changed": 0, **state}, "are_changed", most=1))
        longest, late, count = None, None, len(self._layers)
        if "squares" in state and state["squares"].numel() == count:
            longest = saved.tensor(state, "squares", (count,), dtype=torch.float64)
        if "numbers" in state:
            if (holds := saved.entry(state, "holds")) not in CONTENTS:
                raise ValueError(f"holds={holds!r} in the state must be one of {', '.join(CONTENTS)}: load another one")
            numbers = torch.tensor([float(each) for each in saved.sequence(state, "numbers")], dtype=torch.float64)
            late = (holds, HostCopy(numbers)) if len(numbers) in (7, 7 + 2 * count) else None

        def load() -> None:
            clips()
            self._turn, self._longest, self._late, self.are_changed = turn, longest, late, are_changed

        return load

    @property
    def watches(self) -> bool:
        """True if the next step looks at all layers."""
        return bool(self._layers) and self.clips.watches and not self.are_changed

    def bounds(self) -> Sequence[tuple[UserClip, Collection[str]]]:
        """Return the clips to a norm that is known, each with the names of its layers."""
        known = self.clips.bounded
        if len(self._names) != len(known) or any(
            clip.layers is not own for clip, (own, _) in zip(known, self._names, strict=True)
        ):
            self._names = [(each.layers, frozenset([self._layers[i].name for i in each.layers])) for each in known]
        return [(clip, names) for clip, (_, names) in zip(known, self._names, strict=True)]

    def note_delivered(self, buckets: Sequence[Bucket]) -> None:
        """Keep a sample of a step's updates, which are in the buckets' gradients."""
        updates: dict[str, Tensor] = {}
        for bucket in buckets:
            updates.update(bucket.grads)
        self.keep(updates, next((each.loss_scale for each in buckets if each.loss_scale is not None), None))
        measured = [each for each in buckets if each.squares is not None]
        self._buckets, self._norms = buckets, None
        if measured and self._squares is not None:
            device = self._squares.device
            own = torch.cat([each.squares.to(device) for each in measured if each.squares is not None])
            own = own[self._places(measured, device)]
            # A gradient that is not finite was refused: it is in no moment, and in no residual.
            own.nan_to_num_(0.0, 0.0, 0.0)
            self._own = own
            if self._longest is None:
                self._longest = own
            else:
                longest = self._longest.to(device)
                self._longest = torch.where(own.sum() > longest.sum(), own, longest)
            self._norms = self._squares.sum(), self._longest.sum()

    def _places(self, buckets: Sequence[Bucket], device: torch.device) -> Tensor:
        """Return the place of each layer among those of the buckets."""
        names = tuple(name for each in buckets for name in each.layout.names)
        if self._order is None or self._order[0] != names:
            places = {name: place for place, name in enumerate(names)}
            self._order = names, tensor_on(device, [places[slot.name] for slot in self._layers])
        return self._order[1]

    def keep(self, updates: Mapping[str, Tensor], loss_scale: Tensor | None) -> None:
        """Keep a sample of a step's updates, by layer. Others' than of these layers are of another optimizer."""
        if self._slots and self._slots[0].name not in updates:
            return
        self._kept, self._turn, self.is_scaled = [], self._turn + 1, loss_scale is not None
        for slot in self._chosen():
            if (update := updates.get(slot.name)) is not None:
                sample = self._sample(update.view(-1))
                self._kept.append((slot, sample.clone() if loss_scale is None else sample / loss_scale))
        self._delivered = time.perf_counter()
        watches, self._squares, self._last = self.watches, None, None
        self.clips.end_step()
        if watches:
            self._squares = self._squares_of([updates[slot.name] for slot in self._layers], loss_scale)

    def _squares_of(self, grads: Sequence[Tensor], loss_scale: Tensor | None = None) -> Tensor:
        """Sum the squares of each layer's gradient, on the first layer's device."""
        found = []
        for device, own in itertools.groupby(grads, key=lambda grad: grad.device):
            scale = None if loss_scale is None else loss_scale.to(device, non_blocking=device.type != "cpu")
            found.append(squares_of([*own], scale, self._memory))
        return found[0] if len(found) == 1 else torch.cat([each.to(found[0].device) for each in found])

    def discard(self) -> None:
        """Discard the sample: no step follows."""
        self._kept, self._squares, self._late, self._buckets = [], None, None, ()

    @torch.no_grad()
    def settle(
        self, holds: Holds, sums: int, momentum: float, others: Callable[[], Sequence[UpdateSample]] = lambda: ()
    ) -> None:
        """Compare the gradients with the sample, and undo clips of them.

        A new clip shortens earlier gradients, too. The rest of a sum of gradients goes into the residuals then: it may be long.

        holds: the content of the updates. sums: the number of ranks if updates are their sums; otherwise 1. momentum: that of
        velocities. others: returns the samples of this rank's other models.
        """
        buckets, self._buckets = self._buckets, ()
        update, were_changed = self._squares, self.are_changed
        clipped, suspected, self._suspected = self.check(holds), self._suspected, None
        if suspected is not None and holds != "direction":  # what came before may be too long, and nothing has measured it
            earlier = torch.tensor(suspected) if holds == "gradient" else self._factor_of_velocity(buckets, sums, momentum)
            for bucket in buckets:
                bucket.shorten(earlier)
        if self.are_changed > were_changed:  # a residual of velocities moves weights as far, once the optimizer adds momentum
            for bucket in buckets:
                bucket.shorten(torch.tensor(1 - momentum))
        if clipped is None:
            return
        undone = clipped.factors
        if clipped.new is not None:
            factors = self._factors_of_gradients(clipped, update, sums, others())
            self._shorten(buckets, factors)
            for clip in self.clips.bounded:
                if clip.squares is None and self._own is not None:
                    clip.squares = self._own[tensor_on(self._own.device, clip.layers)].sum()
            if self._longest is not None:
                self._longest = torch.where(clipped.new > 0, 0.0, self._longest)  # all that is kept is cut
            if holds != "direction":
                self._keep_rest(buckets, (factors / clipped.factors - 1) * clipped.new / sums)
                undone = torch.where(clipped.new > 0, 1.0, undone)
        there = [(number, grad) for number, slot in enumerate(self._layers) if (grad := grad_of(slot)) is not None]
        for device, own in itertools.groupby(there, key=lambda each: each[1].device):
            numbers, grads = zip(*own, strict=True)
            inverse = (1 / undone).to(device, torch.float32)
            if inverse.dim():
                each = inverse.unbind()
                torch._foreach_mul_([*grads], [each[number] for number in numbers])
            else:
                torch._foreach_mul_([*grads], inverse)

    def _shorten(self, buckets: Sequence[Bucket], factors: Tensor) -> None:
        """Shorten the earlier gradients of each layer, or those of all by one factor."""
        if not factors.dim():
            for bucket in buckets:
                bucket.shorten(factors)
            return
        own = {slot.name: factor for slot, factor in zip(self._layers, factors.unbind(), strict=True)}
        for bucket in buckets:
            bucket.shorten(torch.stack([own.get(name, torch.ones_like(factors[0])) for name in bucket.layout.names]))

    def _keep_rest(self, buckets: Sequence[Bucket], shares: Tensor) -> None:
        """Add a share of each layer's update, or one of all, to the residuals."""
        left = {n: own for each in buckets if each.keeps_residual for n, own in each.layout.views(each.residual).items()}
        for slot, share in zip(self._layers, shares.expand(len(self._layers)).unbind(), strict=True):
            if slot.name in left and (grad := grad_of(slot)) is not None:
                part = slot.flat(grad).float() * share.to(grad.device, torch.float32)
                left[slot.name].add_(part).clamp_(-LARGEST, LARGEST)

    def _factor_of_velocity(self, buckets: Sequence[Bucket], sums: int, momentum: float) -> Tensor:
        """Return a first clip's factor on earlier gradients that nothing has measured.

        An update has a small part of a gradient that is too long, and the velocity all of it: longer than the clip's norm, and
        than gradients as long as those of the first steps make it. sums, momentum: see settle().
        """
        velocities = [each.velocity for each in buckets if each.velocity is not None]
        grads = [grad for each in self.siblings for slot in each._slots if (grad := grad_of(slot)) is not None]
        if not (velocities and grads):
            return torch.ones(())
        velocity, bound = _norm(velocities), _norm(grads).to(velocities[0].device) / sums
        longest = torch.zeros_like(bound) if self._longest is None else self._longest.sum().sqrt().to(bound.device)
        most = torch.maximum(bound, longest / (1 - momentum))
        return torch.where((velocity > most) & (bound > 0), bound / velocity, 1.0)

    def _factor_since(self, delivered: float) -> Tensor | None:
        """Return the factor of the step's clip of all layers, also before the step; None if it is not of this time's step."""
        if self._squares is None and self._compared < delivered:
            return None
        return self._last if self._squares is None else (self._squares_after().sum() / self._squares.sum()).sqrt()

    def _factors_of_gradients(
        self, clipped: Clipped, update: Tensor | None, sums: int, others: Sequence[UpdateSample]
    ) -> Tensor:
        """Return the factors of new clips on this rank's own gradients, from those on the updates: both have one bound.

        update: its squares by layer. sums: see settle(). Of a sum, each rank has its share of the bound. others: the samples of
        other models, which may be of the same clip.
        """
        factors, new = clipped
        norms = [each._norms for each in self.siblings if each._norms is not None]
        if not norms or update is None or self._longest is None or new is None:
            return torch.ones_like(factors)
        if factors.dim():
            clip_of = self._clip_of(update.device)
            norm, own = (self._by_clip(each).sqrt()[clip_of] for each in (update, self._longest.to(update.device)))
        else:
            for other in others:
                if other._norms is not None and (of_other := other._factor_since(self._delivered)) is not None:
                    same = (of_other.to(factors.device) / factors - 1).abs() <= SAME_FACTOR
                    norms.append((same * other._norms[0].to(same.device), same * other._norms[1].to(same.device)))
            norm, own = (torch.stack([each[i].to(factors.device) for each in norms]).sum().sqrt() for i in (0, 1))
        found = (factors * (norm + 1e-6) / sums / (own + 1e-6)).clamp(max=1)
        return torch.where((factors < 1) & (new > 0), found, 1.0)

    @torch.no_grad()
    def check(self, holds: Holds) -> Clipped | None:
        """Compare the gradients with the sample of updates of this content. Return clips that are to be undone."""
        late, self._late = self._late, None
        if late is not None:
            self._judge(late[0], late[1].all())
        kept, self._kept = self._kept, []
        before, self._squares = self._squares, None
        there = [(slot, grad_of(slot), old) for slot, old in kept]
        now = [(slot, self._sample(slot.flat(grad)), old, grad.dtype) for slot, grad, old in there if grad is not None]
        if not now or self.are_changed:
            return None
        if before is None and all(not new.is_cuda and torch.equal(new, old) for _, new, old, _ in now):
            return None  # a step as most are, in which nothing is learnt
        after = None if before is None else self._squares_after()
        numbers = self._compare(now, before, after)
        if numbers.is_cuda:
            self._late = holds, HostCopy(numbers)
        else:
            self._judge(holds, numbers.tolist())
        known = [each.bound is not None or (each.is_scaling and holds == "direction") for each in self.clips.every]
        if before is None or after is None or not any(known):
            return None
        new = [known and each.is_new for each, known in zip(self.clips.every, known, strict=True)]
        for each, is_known in zip(self.clips.every, known, strict=True):
            each.is_new = each.is_new and not is_known
        is_clip, factors = (numbers[0] > 0) & (numbers[1] > 0), numbers[4]
        self._last, self._compared = factors, time.perf_counter()
        if len(known) > 1:
            masks = tensor_on(before.device, [known, new])[:, self._clip_of(before.device)]
            factors = torch.where((before > 0) & (after > 0) & masks[0], (after / before).sqrt(), 1.0)
            return Clipped(torch.where(is_clip, factors, 1.0), masks[1].double() if any(new) else None)
        is_clip &= numbers[2] > 0
        return Clipped(torch.where(is_clip, factors, 1.0), torch.ones_like(factors) if any(new) else None)

    def _clip_of(self, device: torch.device) -> Tensor:
        """Return the number of each layer's clip."""
        numbers = [0] * len(self._layers)
        for number, clip in enumerate(self.clips.every):
            for layer in clip.layers:
                numbers[layer] = number
        if self._clips is None or self._clips[0] != numbers:
            self._clips = numbers, tensor_on(device, numbers)
        return self._clips[1]

    def _by_clip(self, squares: Tensor) -> Tensor:
        """Sum squares by layer over the layers of each clip."""
        return squares.new_zeros(len(self.clips.every)).index_add_(0, self._clip_of(squares.device), squares)

    def _squares_after(self) -> Tensor:
        """Sum the squares of each layer's gradient before the optimizer's step. Those of a layer without one are 0."""
        grads = [grad_of(slot) for slot in self._layers]
        there = [
            grad if grad.is_contiguous() else slot.flat(grad)
            for slot, grad in zip(self._layers, grads, strict=True)
            if grad is not None
        ]
        found = self._squares_of(there)
        if len(there) == len(grads):
            return found
        every = torch.zeros(len(grads), dtype=torch.float64, device=found.device)
        return every.index_copy_(0, tensor_on(found.device, [i for i, each in enumerate(grads) if each is not None]), found)

    def _compare(
        self, now: Sequence[tuple[Slot, Tensor, Tensor, torch.dtype]], before: Tensor | None, after: Tensor | None
    ) -> Tensor:
        """Compare entries and squares by layer. Return the numbers of a Comparison."""
        device = now[0][2].device if before is None else before.device
        rounding = SMALLEST_CHANGE[any(form != torch.float32 for *_, form in now)]
        changed, uniform, shrinks, cuts = [], [], [], None
        if before is not None and after is not None:
            has_none = any(grad_of(slot) is None for slot in self._layers)
            olds = torch.where(after > 0, before, 0.0) if has_none else before
            factor, norm, squares = (after.sum() / olds.sum()).sqrt(), olds.sum().sqrt(), [olds, after]
            wanted = factor.square() * olds
            if len(self.clips.every) > 1:
                old, new = map(self._by_clip, squares)
                wanted = (new / old)[self._clip_of(device)].nan_to_num(1.0) * olds
            regular = ((after - wanted).abs() <= 2 * rounding * wanted).all()
            shrinks.append((((after > 0) & (after <= (1 + 2 * rounding) * olds)) | (olds == 0)).all())
            changed.append(((after - olds).abs() > 2 * rounding * olds).any())
            cuts = torch.where(olds > 0, after / olds, 1.0).sqrt()
        else:
            lengths = [torch.stack([each.abs().sum().double().to(device) for each in (new, old)]) for _, new, old, _ in now]
            (total, was), squares = torch.stack(lengths).sum(0), []
            factor, norm = total / was, torch.full((), -1.0, dtype=torch.float64, device=device)
            each = torch.stack(lengths)
            regular = ((each[:, 0] - factor * each[:, 1]).abs() <= rounding * factor * each[:, 1]).all()
        sizes = [(old.abs().sum(), SMALLEST_CHANGE[form != torch.float32]) for _, _, old, form in now]
        for (_, new, old, _), (size, smallest) in zip(now, sizes, strict=True):
            changed.append(((new - old).abs().sum() > smallest * size).to(device))
        is_changed = torch.stack(changed).any()
        if device.type == "cpu" and not is_changed:  # no more need be known
            now, sizes = [], []
        for (slot, new, old, _), (size, smallest) in zip(now, sizes, strict=True):
            cut = new.abs().sum() / size if cuts is None else cuts[self._number_of[slot.name]].to(new.device, torch.float32)
            cut = torch.where(size > 0, cut, 1.0)
            is_cut = ((new - cut * old).abs().sum() <= smallest * cut * size) & (cut > 0) & (cut <= 1 + smallest)
            uniform.append(is_cut.to(device))
            is_less = torch.where(old == 0, new == 0, (new.abs() <= (1 + smallest) * old.abs()) & (new * old > 0))
            shrinks.append(is_less.all().to(device))
        shrinks, uniform = shrinks or [~is_changed], uniform + shrinks[:1] * (cuts is not None) or [~is_changed]
        flags = [is_changed, torch.stack(uniform).all(), regular, torch.stack(shrinks).all()]
        numbers = [each.double() for each in flags] + [factor, norm, torch.full_like(norm, rounding)]
        return torch.cat([torch.stack(numbers), *squares])

    def _chosen(self) -> list[Slot]:
        """Choose the largest layer, others in turn, and those that have another clip since the last step."""
        largest, others = self._slots[:1], self._slots[1:]
        begin = (LAYERS - 1) * self._turn
        moved = [self._layers[number] for number in self.clips.moved]
        turns = [others[(begin + i) % len(others)] for i in range(min(LAYERS - 1, len(others)))]
        return [*dict.fromkeys(largest + turns + moved)]

    def _sample(self, flat: Tensor) -> Tensor:
        stride = max(1, flat.numel() // UPDATED_ENTRIES)
        return flat.detach()[self._turn % stride :: stride].float()  # other entries in each step: few may be sent

    def _judge(self, holds: Holds, numbers: Sequence[float]) -> None:
        """Learn from a comparison, or complain."""
        half = 7 + len(numbers[7:]) // 2
        step = Comparison(*numbers[:7], squares=(numbers[7:half], numbers[half:]))  # type: ignore[misc, arg-type]
        if step.changed and (not step.is_uniform or (not self.clips.is_known and self._is_unscaled)):
            self._complain(holds, shrinks=bool(step.shrinks))
        elif step.norm >= 0:
            self.are_changed |= self.clips.note(step, CONTENTS[holds], len(self.siblings) == 1, self._delivered)
        elif step.changed:
            self._suspected = step.factor if step.is_regular and not self.clips.watches else None
            self.clips.suspect()

    @property
    def _is_unscaled(self) -> bool:
        """True if a GradScaler that was not passed steps the optimizer: it has taken its scale out of the updates."""
        return not self.is_scaled and scaler_is_unknown()

    def _complain(self, holds: Holds, shrinks: bool) -> None:
        is_unscaled = self._is_unscaled
        if holds == "direction":
            text = UNSCALED if is_unscaled else UPDATE_CHANGED
            raise RuntimeError(text.format(content=CONTENTS[holds], outcome=REFUSED))
        falls_back, was_warned = holds == "velocity" and shrinks, self._warned
        if holds == "velocity" and not (is_unscaled or self.are_changed or (was_warned and not falls_back)):
            self._warned, self.are_changed = True, falls_back  # UnknownScaler has warned of a scaler
            self.clips = UserClips(len(self._layers)) if falls_back else self.clips
            outcome = FALLS_BACK if falls_back else REFUSED
            warn_user(UPDATE_CHANGED.format(content=CONTENTS[holds], outcome=outcome), of_one_rank=True)


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the norm of all tensors together."""
    norms = [torch.linalg.vector_norm(each.detach(), dtype=torch.float64) for each in tensors]
    total: Tensor = torch.stack([each.to(norms[0].device) for each in norms]).norm()
    return total
