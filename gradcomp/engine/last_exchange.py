"""The last exchange of a session, until a step of the optimizer applies its update. It is undone if none does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradcomp.engine import state
from gradcomp.engine.acting_optimizer import parameters_of
from gradcomp.engine.kept_gradients import KeptGradients
from gradcomp.engine.optimizer_steps import warn_user
from gradcomp.engine.optimizer_view import OptimizerView
from gradcomp.engine.reducer import Reducer
from gradcomp.engine.slots import Slot, Slots

# The first exchanges of a session, before which its state is copied. A GAN whose discriminator takes five steps for each of the
# generator drops its sixth exchange.
TRIAL = 8
# Later, one exchange in this many looks for gradients that are removed before the step.
LOOKS = 16
# A discriminator drops at least one of so many updates: one for each of the generator's steps. A spike guard drops fewer.
DROPS, DROPS_SHARE = 4, 8

_LATE = (
    "no optimizer.step() applied the update of exchange {number}. This once, the entries that it sent are lost, and others of "
    "its gradients come later. From now on the state is copied before every exchange, which is undone if no step applies it"
)
_CLOSURES = (
    "{name} calls its closure several times in one step(), and compares gradients. Under {keeper} they differ even where the "
    "weights are equal: a residual moves on with every exchange, entries are rounded at random, and auto tries candidates. "
    "Take blocks, half or dense, or an optimizer that calls it once"
)
_REMOVED = (
    "the gradient of {name!r} was set to None between its exchange and step(): the optimizer leaves the layer alone, but the "
    "update's entries have left the residual, or are in the momentum. They are lost. To pause a layer, freeze it before the "
    "forward pass, by requires_grad_(False), under DDP with find_unused_parameters=True"
)
_RIVALS = (
    "no optimizer.step() applied {drops} of {count} updates of the model that steps here: they were set to zero first, or to "
    "None. They are undone, but {keeper} keeps a residual, and its updates are no gradients. In a GAN, where the generator's "
    "loss goes through the discriminator, models that train against each other learn worse from gradients that come late: take "
    "{others} for both, which keep no residual. Where the first of two backward passes moves the weights, as SAM's does, "
    "run it in DistributedDataParallel.no_sync()"
)
_FROZEN = (
    "the model was used {drops} times with all its parameters frozen, and inputs that need gradients. If it is a GAN's "
    "discriminator while the generator learns: {keeper} keeps a residual, and models that train against each other learn worse "
    "from gradients that come late. Take {others} for both, which keep no residual"
)
_LEFT_OUT = (
    "no optimizer.step() applied the last {drops} updates: they were set to zero first, or to None, and are undone. If a guard "
    "leaves out steps by the norm that clip_grad_norm_() returns: that is an update's, which may be hundreds of times a "
    "gradient's. Let it compare the mean over the ranks of stats()['grad_norm'], which is each rank's own, so that all decide "
    "alike; or take blocks, which exchanges gradients"
)


class LastExchange:
    """The last exchange of a session, until a step of an optimizer applies its update. It is undone if none does.

    The state and this rank's own gradients are copied before an exchange: in the first ones, and for good once a step has left
    one out. The next backward pass finds the update in the gradients, or it was dropped. An update without momentum that is
    still there counts: it is exchanged with the new gradients. One with momentum is undone, and the own gradients return in its
    place. A dropped update is undone. A single layer's is not: it is warned of, once.

    waits: no step has applied the update. is_nested: a step() has called the one that begins. trial: the exchanges that are
    copied at first; 0: no steps follow at all. suited: names specs for a GAN, from a room that knows the compressors.
    """

    def __init__(self, slots: Slots, view: OptimizerView, trial: int):
        self._slots, self._view, self._trial = slots, view, trial
        self.waits, self.is_nested, self._has_closure = False, False, False
        self._inside: torch.optim.Optimizer | None = None  # the one that steps
        self._first: Slot | None = None  # the one with the first gradient of the exchange
        self._drops = self._on_end = 0  # of all updates, and of the last ones, since any optimizer stepped
        self._frozen = 0  # forward passes of the whole model frozen
        self.suited = "auto"
        self._keeper: Any = None
        self._exchanges = self._exchanges_inside = 0
        self._copies = self._copies_own = self._for_good = self._in_main_memory = self._steps_are_seen = False
        self._reducer: Reducer | None = None
        self._generation = 0, 0  # the reducer's, before the exchange
        self._share: dict[str, Any] | None = None
        self._own: list[tuple[torch.nn.Parameter, Tensor]] = []
        self._given: list[torch.nn.Parameter] = []  # that have a gradient of this rank in the exchange
        self._looks = self._has_warned = self._has_warned_of_drops = False
        self._watched: list[tuple[Any, Any]] = []  # nodes of the graph, which live as long as somebody has them
        # A backward pass has a thread for each device: one would add to gradients while another looks at them.
        self._on_one_device = len({each.device for each in slots.parameters.values()}) == 1
        self._kept = KeptGradients(slots, view, trial if self._on_one_device else 0)

    @property
    def share_before(self) -> dict[str, Any] | None:
        """The share of a state from before an exchange that no step has applied; None if a step will probably do it."""
        return self._share if self.waits and self._for_good else None

    # Steps of the optimizer.

    def enter_step(self, optimizer: torch.optim.Optimizer, trains: bool, has_closure: bool) -> bool:
        """Note that an optimizer steps. trains, which is returned: it trains parameters that have been exchanged.

        has_closure: exchanges may begin within the step. No hook of torch's tells the end of a step that raises an error.
        """
        self._on_end = 0
        if trains or (not self._view.exchanged and self._view.trains(optimizer)):
            self.is_nested = self._inside is not None
            self._inside, self._exchanges_inside, self._steps_are_seen = optimizer, 0, True
            self._has_closure = has_closure
            if self.waits and any(each.grad is not None for each in self._slots.parameters.values()):
                self._look_for_removed(optimizer)
                self._kept.take(self._own)
                self.settle()
        return trains

    def leave_step(self) -> None:
        """Note that the optimizer has stepped, also by the update of an exchange in its closure."""
        if self._inside is None:
            return
        if self._exchanges_inside:
            self.settle()
        self._kept.give_back(self._inside)
        self._inside = None

    def settle(self) -> None:
        """Forget the last exchange: its update has been applied, or is no longer known."""
        self.waits, self._share, self._reducer = False, None, None
        self._own.clear()
        self._given.clear()
        while self._watched:
            self._watched.pop()[1].remove()

    def note_frozen(self, reducer: Reducer) -> None:
        """Note a forward pass with all parameters frozen, through which gradients are to go. Warn, once, of a GAN."""
        self._frozen += self._exchanges > 0
        is_gan = self._frozen == DROPS and self._exchanges <= DROPS_SHARE * DROPS
        if is_gan and reducer.keeps_residual and not self._has_warned_of_drops:
            self._has_warned_of_drops = True
            warn_user(_FROZEN.format(drops=DROPS, keeper=self._keeper, others=self.suited))

    def _look_for_removed(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn, once, of gradients that are gone, where the optimizer steps with others of the same exchange."""
        gone = [each for each in self._given if each.grad is None and each.requires_grad]
        if not gone:
            return
        own = {id(each) for each in parameters_of(optimizer)}
        lost = next((each for each in gone if id(each) in own), None)
        if lost is not None and any(each.grad is not None and id(each) in own for each in self._given):
            slot, self._has_warned = self._slots.slot(lost), True
            warn_user(_REMOVED.format(name="" if slot is None else slot.name), of_one_rank=True)

    # An exchange.

    def begin(self, keeper: Any, first: Slot | None) -> None:
        """Begin an exchange. first: the slot of its first gradient, if it is known.

        keeper: exchanges equal gradients differently from one time to the next; None: nothing does.

        Refuse a second one in the same step of an optimizer if there is a keeper.
        """
        # After a step that failed, and was skipped, the velocity has that step's weight decay already.
        self._copies = self._for_good or (self._exchanges < self._trial and not self.waits)
        self._copies_own = self._copies or self._kept.needs_copies
        self.settle()
        self._kept.begin()
        self._looks = not self._has_warned and (self._exchanges < self._trial or self._exchanges % LOOKS == 0)
        self._exchanges_inside += self._inside is not None and self._has_closure
        self._keeper, self._first = keeper, first
        if keeper is not None and self._exchanges_inside > 1:
            raise RuntimeError(_CLOSURES.format(name=type(self._inside).__name__, keeper=keeper))

    def keep(self, reducer: Reducer, slots: Iterable[Slot]) -> None:
        """Copy this rank's own gradients in some slots, and before the first ones the state."""
        if not (self._looks or self._copies_own) or not (reducer.keeps_state or reducer.takes_momentum):
            return
        given = [each for slot in slots if (each := slot.parameter) is not None and each.grad is not None]
        if self._looks:
            self._given += given
        if self._copies and self._share is None:
            self._generation = reducer.generation
            self._share = state.save_share(reducer, self._slots.shapes, sums=self._view.sums, copy=self._copy)
        if reducer.takes_momentum and self._copies_own:
            self._own += [(each, self._copy(each.grad)) for each in given if each.grad is not None]

    def end(self, reducer: Reducer, watches: bool) -> None:
        """Note that the updates have been delivered. watches: look at gradients in the next backward pass, whichever it is."""
        self.waits, self._reducer = self._trial > 0, reducer
        self._exchanges += 1
        if not (reducer.keeps_state or self._view.taken):
            self._given.clear()  # an update that is not applied is no loss
        if watches:
            self.watch(self._slots.slots if self._share is not None or self._first is None else [self._first])

    def watch(self, slots: Iterable[Slot]) -> None:
        """Look at the gradients before the next backward pass adds to those of these slots."""
        own = weakref.ref(self)  # torch, which has the nodes, is not to have the session

        def look(grads: Any) -> None:
            if (last := own()) is not None:
                last._look()

        for slot in slots if self.waits and not self._watched and self._on_one_device else []:
            if (parameter := slot.parameter) is not None and parameter.requires_grad:
                with torch.enable_grad():
                    node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                self._watched.append((node, node.register_prehook(look)))

    def _look(self) -> None:
        reducer, self._reducer = self._reducer, None
        # A loop over the parameters, say, may have applied the update, if no optimizer has been seen to step.
        seen = self._steps_are_seen or (self._view.is_told and self._exchanges <= self._trial)
        if reducer is not None and seen:  # otherwise another gradient of this pass came first
            self._decide(reducer)

    @torch.no_grad()
    def _decide(self, reducer: Reducer) -> None:
        """Undo the exchange if its update was dropped, or holds momentum. This waits for a device if gradients are there."""
        grads = [each.grad for each in self._slots.parameters.values() if each.grad is not None]
        stays, taken = any(bool(grad.any()) for grad in grads), self._view.taken
        if stays and not taken:
            return
        if not (reducer.keeps_state or taken) or (not self._for_good and reducer.has_failed()):
            return  # nothing is left of it: the updates of a step that failed have been taken back
        self._view.take_back_update(stays)
        texts = [] if stays else self._note_drop(reducer)
        if self._share is None:
            texts.append(_LATE.format(number=self._exchanges))
            for grad in grads:
                grad.zero_()
        else:
            state.undo(reducer, self._slots.shapes, self._share)
            reducer.generation = self._generation
            if stays:
                self._put_own_back()
        self._for_good, self.waits = True, False
        for text in texts:
            warn_user(text)

    def _put_own_back(self) -> None:
        """Put this rank's own gradients in the place of the update; None where the rank had none."""
        own = {id(parameter): grad for parameter, grad in self._own}
        for parameter in self._slots.parameters.values():
            if parameter.grad is None:
                continue
            if (grad := own.get(id(parameter))) is None:
                parameter.grad = None
            else:
                parameter.grad.copy_(grad)

    def _note_drop(self, reducer: Reducer) -> list[str]:
        """Count a dropped update. Return a warning, once: of a guard that leaves out all steps, or of a residual in a GAN.

        A step that failed has no update that could be dropped: a GradScaler skips it, or the program does.
        """
        if self._has_warned_of_drops or reducer.has_failed():
            return []
        self._drops, self._on_end = self._drops + 1, self._on_end + 1
        if self._on_end >= DROPS:
            text = _LEFT_OUT.format(drops=self._on_end)
        elif self._drops == DROPS and reducer.keeps_residual and self._exchanges <= DROPS_SHARE * DROPS:
            words = {"drops": DROPS, "count": self._exchanges, "keeper": self._keeper, "others": self.suited}
            text = _RIVALS.format(**words)
        else:
            return []
        self._has_warned_of_drops = True
        return [text]

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor: to main memory where the copy may be for nothing, or a device has no room."""
        if (self._for_good or self._kept.is_kept) and not self._in_main_memory:
            try:
                return tensor.detach().clone()
            except torch.cuda.OutOfMemoryError:
                self._in_main_memory = True
        return tensor.detach().to("cpu", copy=True)
