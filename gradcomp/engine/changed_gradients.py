"""Changes of gradients that an exchange would undo, and of updates before the optimizer steps, found by samples of entries.

On a CPU a change is found in its own step. On a GPU it is found one step later, so that no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.engine.bucket import Bucket
from gradcomp.engine.optimizer_steps import warn_user
from gradcomp.engine.slots import Slot
from gradcomp.engine.stages.stage import Copy, squares_of
from gradcomp.engine.user_clip import CONTENTS, UserClip, scaler_is_unknown
from gradcomp.native.extension import LARGEST
from gradcomp.native.memory import HostCopy, Memory

# The content of updates: the optimizer's momentum, or gradients that error feedback has kept.
Holds = Literal["direction", "velocity", "gradient"]
# Gradients that are sampled in every step, and entries of each.
GRADIENTS, ENTRIES = 2, 16
# The most entries of an updated layer in a sample: sparse updates are mostly 0. The layers: the largest, and others in turn.
UPDATED_ENTRIES, LAYERS = 4096, 4
# A change by less than this share is rounding: by unscaling, for example. The first is of float32, the second of other types.
SMALLEST_CHANGE = 1e-4, 1e-2

_GRADIENT_CHANGED = (
    "the gradient of {name!r} was changed between backward() and step(), after its exchange had begun: the update would undo "
    "the change. Finish the exchange first: a clip of all gradients by one norm is then understood. For other changes, call "
    "parameter.register_hook(lambda grad: ...) once, since with momentum or Adam there are none after the exchange{lines}"
)
_UPDATE_CHANGED = (
    "the gradients were changed between their exchange and step(), and not by one factor, as clip_grad_norm_() of all "
    "parameters does, which is understood. With momentum=auto they hold {content}. Clip all parameters by one norm. Change "
    "gradients otherwise, as a clip of some layers or of values does, or a mask, before their exchange: call "
    "parameter.register_hook(lambda grad: grad * mask) once, and remove the later change. Or write momentum=0 (under auto, "
    "loss=low), and the exchange is of gradients"
)
_UNSCALED = (
    "the gradients were changed between their exchange and step(), which looks like GradScaler.unscale_(): a GradScaler steps "
    "the optimizer, and gradcomp does not know it. Pass scaler=scaler where you pass the spec. With momentum=auto they hold "
    "{content}, and have no loss scale to take out. With scaler= they have it, and a clip after unscale_() is understood, too"
)
_INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


class GradientSample:
    """A few entries of a few gradients, from the beginning of their exchange to the end of the step.

    Other parameters take their turn in the next step. parameters: their number. lines: the door's, for its user to change
    gradients after their exchange.
    """

    def __init__(self, parameters: int, lines: str = ""):
        self._parameters, self._lines = parameters, lines
        self._seen = self._steps = 0
        self._kept: list[tuple[Slot, Tensor, Tensor, Tensor]] = []
        self._late: list[tuple[Slot, HostCopy]] = []

    def keep(self, slot: Slot) -> None:
        """Keep entries of a complete gradient, if it is its turn."""
        turn = (self._seen - self._steps) % self._parameters
        self._seen += 1
        if turn >= GRADIENTS or (grad := _grad_of(slot)) is None:
            return
        entries = _entries(slot, grad, self._steps)
        if entries is not None:
            self._kept.append((slot, grad, entries, entries.clone()))

    def check(self) -> None:
        """Raise an error if a kept entry has changed."""
        kept, self._kept = self._kept, []
        late, self._late = self._late, []
        self._seen, self._steps = 0, self._steps + GRADIENTS
        for slot, changes in late:
            if changes.largest():
                raise self._refusal(slot)
        for slot, grad, entries, before in kept:
            if grad.is_cuda and _grad_of(slot) is grad:
                self._late.append((slot, HostCopy((entries != before).sum())))
            elif _grad_of(slot) is not grad or not torch.equal(entries, before):
                raise self._refusal(slot)

    def discard(self) -> None:
        """Discard all entries of a step that failed."""
        self._kept, self._late, self._seen = [], [], 0

    def _refusal(self, slot: Slot) -> RuntimeError:
        return RuntimeError(_GRADIENT_CHANGED.format(name=slot.name, lines=self._lines))


class Clipped(NamedTuple):
    """A clip of the updates that is known. factor: float64, 1 where there was none in this step. is_new: it is the first."""

    factor: Tensor
    is_new: bool


class UpdateSample:
    """Entries of some layers' updates, without the loss scale, from their delivery to the optimizer's step.

    A change by one factor below 1 is a clip. Another change of directions is refused; one of a velocity is warned of, once.

    clip: the user's. is_scaled: the gradients have the loss scale until a scaler takes it out. siblings: the samples of all
    optimizers of the model.
    """

    def __init__(self, slots: Sequence[Slot]):
        self.clip, self._memory = UserClip(), Memory()
        self._warned = self.is_scaled = False
        self._slots = sorted(slots, key=lambda slot: -slot.layer.size)
        self._kept: list[tuple[Slot, Tensor]] = []
        self.siblings: Sequence[UpdateSample] = (self,)
        self._buckets: Sequence[Bucket] = ()
        self._squares: list[tuple[list[Slot], Tensor]] = []  # by device: the layers, and the squares of each update
        self._norms: tuple[Tensor, Tensor] | None = None  # the squares of the update, and of this rank's longest gradient
        self._longest: Tensor | None = None
        self._late: tuple[Holds, HostCopy] | None = None
        self._turn, self._suspected = 0, None  # type: tuple[int, float | None]

    def save(self, copy: Copy | None = None) -> dict[str, Any]:
        """Copy what is known of the user's clip. copy: copies this rank's own part; None leaves it out."""
        state: dict[str, Any] = {"clip": self.clip.save(), "turn": self._turn}
        if self._late is not None:
            state |= {"holds": self._late[0], "late": self._late[1].all()}
        if copy is not None and self._longest is not None:
            state["longest"] = copy(self._longest)
        return state

    def load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check what save() copied. Return a function that loads it, and cannot fail. An empty state forgets the clip."""
        clip, turn = self.clip.load(saved.table_or_empty(state, "clip")), saved.read_int({"turn": 0, **state}, "turn")
        longest = saved.tensor(state, "longest", (), dtype=torch.float64) if "longest" in state else None
        late = None
        if "late" in state:
            if (holds := saved.entry(state, "holds")) not in CONTENTS:
                raise ValueError(f"holds={holds!r} in the state must be one of {', '.join(CONTENTS)}: load another one")
            late = holds, HostCopy(torch.tensor(saved.numbers_of(state, "late", 4), dtype=torch.float64))

        def load() -> None:
            clip()
            self._turn, self._longest, self._late = turn, longest, late

        return load

    @property
    def watches(self) -> bool:
        """True if the next step looks at all layers."""
        return bool(self._slots) and self.clip.watches

    def note_delivered(self, buckets: Sequence[Bucket]) -> None:
        """Keep a sample of a step's updates, which are in the buckets' gradients."""
        updates = {name: grad for bucket in buckets for name, grad in bucket.grads.items()}
        self.keep(updates, next((each.loss_scale for each in buckets if each.loss_scale is not None), None))
        own = [each.squares for each in buckets if each.squares is not None]
        self._buckets, self._norms = buckets, None
        if own and self._squares:
            device = own[0].device
            update = torch.stack([squares.sum().to(device) for _, squares in self._squares]).sum()
            # A gradient that is not finite was refused: it is in no moment, and in no residual.
            longest = torch.stack([each.to(device) for each in own]).sum().nan_to_num_(0.0, 0.0, 0.0)
            self._longest = longest if self._longest is None else torch.fmax(longest, self._longest.to(device))
            self._norms = update, self._longest

    def keep(self, updates: Mapping[str, Tensor], loss_scale: Tensor | None) -> None:
        """Keep a sample of a step's updates, by layer. Others' than of these layers are of another optimizer."""
        if self._slots and self._slots[0].name not in updates:
            return
        self._kept, self._turn, self.is_scaled = [], self._turn + 1, loss_scale is not None
        for slot in self._chosen():
            if (update := updates.get(slot.name)) is not None:
                sample = self._sample(update.view(-1))
                self._kept.append((slot, sample.clone() if loss_scale is None else sample / loss_scale))
        self._squares = []
        watches = self.watches
        self.clip.end_step()
        if watches:
            own = [slot for slot in self._slots if slot.name in updates]
            for device in dict.fromkeys(slot.layer.device for slot in own):
                there = [slot for slot in own if slot.layer.device == device]
                scale = None if loss_scale is None else loss_scale.to(device, non_blocking=device.type != "cpu")
                self._squares.append((there, squares_of([updates[slot.name] for slot in there], scale, self._memory)))

    def discard(self) -> None:
        """Discard the sample: no step follows."""
        self._kept, self._squares, self._late, self._buckets = [], [], None, ()

    @torch.no_grad()
    def settle(self, holds: Holds, sums: int, momentum: float) -> None:
        """Compare the gradients with the sample, and undo a clip of them.

        A new clip shortens earlier gradients, too. The rest of a sum of gradients goes into the residuals then: it may be long.

        holds: the content of the updates. sums: the number of ranks if updates are their sums; otherwise 1. momentum: that of
        velocities.
        """
        buckets, self._buckets = self._buckets, ()
        clipped, suspected, self._suspected = self.check(holds), self._suspected, None
        if suspected is not None and holds != "direction":  # what came before may be too long, and nothing has measured it
            earlier = torch.tensor(suspected) if holds == "gradient" else self._factor_of_velocity(buckets, sums, momentum)
            for bucket in buckets:
                bucket.shorten(earlier)
        if clipped is None:
            return
        grads = [(slot, grad) for slot in self._slots if (grad := _grad_of(slot)) is not None]
        if clipped.is_new:
            factor = self._factor_of_gradients(clipped.factor, sums)
            self._longest = None  # all that is kept is cut
            for bucket in buckets:
                bucket.shorten(factor)
            if holds != "direction":
                rest = (factor / clipped.factor - 1) / sums
                left = {
                    n: own for each in buckets if each.keeps_residual for n, own in each.layout.views(each.residual).items()
                }
                for slot, grad in grads:
                    if slot.name in left:
                        part = slot.flat(grad).float() * rest.to(grad.device, torch.float32)
                        left[slot.name].add_(part).clamp_(-LARGEST, LARGEST)
                return
        for device in dict.fromkeys(slot.layer.device for slot, _ in grads):
            own = [grad for slot, grad in grads if slot.layer.device == device]
            torch._foreach_mul_(own, (1 / clipped.factor).to(device, torch.float32))

    def _factor_of_velocity(self, buckets: Sequence[Bucket], sums: int, momentum: float) -> Tensor:
        """Return a first clip's factor on earlier gradients that nothing has measured.

        An update has a small part of a gradient that is too long, and the velocity all of it: longer than the clip's norm, and
        than gradients as long as those of the first steps make it. sums, momentum: see settle().
        """
        velocities = [each.velocity for each in buckets if each.velocity is not None]
        grads = [grad for each in self.siblings for slot in each._slots if (grad := _grad_of(slot)) is not None]
        if not (velocities and grads):
            return torch.ones(())
        velocity, bound = _norm(velocities), _norm(grads).to(velocities[0].device) / sums
        longest = torch.zeros_like(bound) if self._longest is None else self._longest.sqrt().to(bound.device)
        most = torch.maximum(bound, longest / (1 - momentum))
        return torch.where((velocity > most) & (bound > 0), bound / velocity, 1.0)

    def _factor_of_gradients(self, factor: Tensor, sums: int) -> Tensor:
        """Return the factor of a clip on this rank's own gradients, from its factor on the updates: both have one bound.

        sums: see settle(). Of a sum, each rank has its share of the bound.
        """
        norms = [each._norms for each in self.siblings if each._norms is not None]
        if not norms:
            return torch.ones_like(factor)
        update, own = (torch.stack([each[i].to(factor.device) for each in norms]).sum().sqrt() for i in (0, 1))
        return torch.where(factor < 1, (factor * (update + 1e-6) / sums / (own + 1e-6)).clamp(max=1), 1.0)

    @torch.no_grad()
    def check(self, holds: Holds) -> Clipped | None:
        """Compare the gradients with the sample, before the optimizer's step. Return a clip that is to be undone.

        holds: the content of the updates.
        """
        late, self._late = self._late, None
        if late is not None:
            self._judge(late[0], late[1].all())
        kept, self._kept = self._kept, []
        squares, self._squares = self._squares, []
        there = [(slot, _grad_of(slot), old) for slot, old in kept]
        now = [(self._sample(slot.flat(grad)), old, grad.dtype) for slot, grad, old in there if grad is not None]
        if not now:
            return None
        numbers = self._compare(now, squares)
        if numbers.is_cuda:
            self._late = holds, HostCopy(numbers)
        else:
            self._judge(holds, numbers.tolist())
        if not squares or not (self.clip.bound is not None or (self.clip.is_scaling and holds == "direction")):
            return None
        is_new, self.clip.is_new = self.clip.is_new, False
        return Clipped(torch.where((numbers[0] > 0) & (numbers[1] > 0), numbers[2], 1.0), is_new)

    def _compare(
        self, now: Sequence[tuple[Tensor, Tensor, torch.dtype]], squares: Sequence[tuple[list[Slot], Tensor]]
    ) -> Tensor:
        """Compare entries and squares. Return whether they changed, whether by one factor, this factor, and the norm before.

        The norm is -1 where only a sample was looked at.
        """
        device = now[0][1].device
        rounding = SMALLEST_CHANGE[any(form != torch.float32 for _, _, form in now)]
        before, after, equal = [], [], []
        if squares:
            for slots, old in squares:
                grads = [_grad_of(slot) for slot in slots]
                there = [i for i, grad in enumerate(grads) if grad is not None]
                given = [g if g.is_contiguous() else s.flat(g) for s, g in zip(slots, grads, strict=True) if g is not None]
                own = squares_of(given, None, self._memory)
                before.append((old if len(there) == len(slots) else old[there]).to(device))
                after.append(own.to(device))
            olds, news = torch.cat(before), torch.cat(after)
            factor, norm = (news.sum() / olds.sum()).sqrt(), olds.sum().sqrt()
            wanted = factor.square() * olds
            equal.append(((news - wanted).abs() <= 2 * rounding * wanted).all())
        else:
            total = (
                torch.stack([torch.stack([new.abs().sum(), old.abs().sum()]).to(device) for new, old, _ in now]).double().sum(0)
            )
            factor, norm = total[0] / total[1], torch.full((), -1.0, dtype=torch.float64, device=device)
        changed = [(factor - 1).abs() > rounding]
        for new, old, form in now:
            size, smallest = old.abs().sum(), SMALLEST_CHANGE[form != torch.float32]
            changed.append(((new - old).abs().sum() > smallest * size).to(device))
            cut = factor.to(new.device, torch.float32)
            equal.append(((new - cut * old).abs().sum() <= smallest * cut * size).to(device))
        is_cut = torch.stack(equal).all() & (factor < 1) & (factor > 0)
        return torch.stack([torch.stack(changed).any().double(), is_cut.double(), factor, norm])

    def _chosen(self) -> list[Slot]:
        """Choose the largest layer, and others in turn."""
        largest, others = self._slots[:1], self._slots[1:]
        begin = (LAYERS - 1) * self._turn
        return largest + [others[(begin + i) % len(others)] for i in range(min(LAYERS - 1, len(others)))]

    def _sample(self, flat: Tensor) -> Tensor:
        stride = max(1, flat.numel() // UPDATED_ENTRIES)
        return flat.detach()[self._turn % stride :: stride].float()  # other entries in each step: few may be sent

    def _judge(self, holds: Holds, numbers: Sequence[float]) -> None:
        """Learn from a comparison, or complain."""
        changed, is_cut, factor, norm = numbers
        if not changed:
            self.clip.note_absent(norm)
        elif not is_cut or (not self.clip.is_known and self._is_unscaled):
            self._complain(holds)
        elif norm < 0:
            self._suspected = None if self.clip.watches else factor
            self.clip.suspect()
        else:
            self.clip.note(factor, norm, CONTENTS[holds], is_whole=len(self.siblings) == 1)

    @property
    def _is_unscaled(self) -> bool:
        """True if a GradScaler that was not passed steps the optimizer: it has taken its scale out of the updates."""
        return not self.is_scaled and scaler_is_unknown()

    def _complain(self, holds: Holds) -> None:
        is_unscaled = self._is_unscaled
        if holds == "direction":
            raise RuntimeError((_UNSCALED if is_unscaled else _UPDATE_CHANGED).format(content=CONTENTS[holds]))
        if holds == "velocity" and not (self._warned or is_unscaled):  # UnknownScaler has warned of a scaler
            self._warned = True
            warn_user(_UPDATE_CHANGED.format(content=CONTENTS[holds]), of_one_rank=True)


def _grad_of(slot: Slot) -> Tensor | None:
    grad = None if slot.parameter is None else slot.parameter.grad
    return None if grad is None or grad.is_sparse else grad


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the norm of all tensors together."""
    norms = [torch.linalg.vector_norm(each.detach(), dtype=torch.float64) for each in tensors]
    total: Tensor = torch.stack([each.to(norms[0].device) for each in norms]).norm()
    return total


def _entries(slot: Slot, grad: Tensor, turn: int) -> Tensor | None:
    """View some entries of a gradient, spread over it, as integers: a NaN then equals itself. Others come in the next turn.

    None for a type that kernels do not read, and for a memory order that is not the parameter's, in which a view is not flat.
    """
    ordered, integers = grad.permute(slot.order), _INTEGERS.get(grad.dtype)
    if integers is None or not ordered.is_contiguous():
        return None
    step = max(1, grad.numel() // ENTRIES)
    return ordered.view(-1)[turn % step :: step][:ENTRIES].view(integers)
