"""The exchange of updates around the steps of the user's optimizers.

Each optimizer steps on its rank's own gradients, as if it were alone. Before a step the weights are copied. After it, start
minus now goes into the residual, the ranks exchange what their compressors take from it, and the weights become start minus the
mean, equal to the last bit on all ranks. What the program does to its gradients between backward() and step() needs no code.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.engine import state
from gradcomp.engine.announcement import of_updates
from gradcomp.engine.bucket import Bucket
from gradcomp.engine.context import layer_rates
from gradcomp.engine.digests import differences, digests
from gradcomp.engine.phases import Phase
from gradcomp.engine.reducer import Reducer
from gradcomp.engine.slots import local
from gradcomp.engine.updates.agreement import BACKWARD, STEP, Agreement, LocalGradients
from gradcomp.engine.updates.hidden_momentum import HiddenMomentum, Momentum, class_of, decay_of
from gradcomp.engine.updates.optimizers import Optimizers, Trained
from gradcomp.engine.updates.progress import StepRule
from gradcomp.engine.updates.steps import exchanged_by_later, give_up_failed, makes_state, warn_user
from gradcomp.engine.updates.unsuited import refuse_unsuited, why_unsuited
from gradcomp.native.memory import Memory
from gradcomp.networks import gather

_IN_BACKWARD = (
    "{name}.step() was called within backward(), where no updates can be exchanged: call it after backward(), or take the spec "
    '"blocks", which exchanges gradients'
)
_CAPTURED = (
    "{name}.step() is captured in a CUDA graph, which would repeat one step's exchange: capture forward and backward passes, "
    'and call step() outside of the graph, or take the spec "blocks"'
)
_ADDED = (
    "{name} got a parameter of shape {shape} after gradcomp was set up, and no rank exchanges it: each trains its own. Give it "
    "to the optimizer from the beginning, and freeze it after attach() until you train it, or create both again"
)
_SUMS = (
    "op=Sum adds the ranks' updates up, and those of {name} do not grow with the gradient: its steps would be as many times "
    'too long as there are ranks. Use op=Average, or the spec "blocks", which exchanges gradients'
)

# Backward passes without a step of any optimizer, before the warning. Few trainings add up so many.
PASSES_BEFORE_WARNING = 200
_NO_STEP = (
    f"{PASSES_BEFORE_WARNING} backward passes, and no torch optimizer has stepped: updates are exchanged after its step(). Was "
    'optimizer.step() forgotten? If the program moves the weights by itself, take the spec "blocks", which exchanges gradients'
)
_NEVER_STEPPED = (
    "this rank has joined without a step of its own, and does not know what the others exchange after theirs: give each rank "
    'at least one batch, or take the spec "blocks", which exchanges gradients'
)

# After the first so many exchanges since the ranks met, and then every so many, they compare their weights.
FIRST_COMPARED, COMPARED_EVERY = (10, 100), 1000
_APART = (
    "after {count}, {parted}: updates move all ranks alike, so the program moves weights on some ranks only, or by each "
    "rank's own gradients beside the optimizer's steps. Let all ranks make the same changes, or take the spec "
    '"blocks", which exchanges gradients'
)


class StepExchange:
    """One session's exchange of updates. The hooks in steps.py call it before and after each optimizer step.

    gradients: this rank's own, of the last backward pass. given_momentum: the spec's, in place of the optimizers'.
    has_gradients: some have come since the last step; has_unchecked_gradients: since the last end of a backward pass;
    has_seen_gradients: ever. lags: other ranks step, and this one has no batch. in_step: steps under way, as in a closure.
    keeps_residuals: where an optimizer's state is loaded, too. since_meeting: exchanges since the ranks met, alike on all.
    """

    session: Any  # which has this object

    def __init__(self, session: Any):
        self.session = weakref.proxy(session)
        self.optimizers = Optimizers(session)
        self.gradients, self._agreement = LocalGradients(Memory()), Agreement(session.network, self.optimizers.layers)
        self.has_gradients = self.has_unchecked_gradients = self.has_seen_gradients = self.lags = False
        self.given_momentum: Momentum | None = None
        self.in_step = 0
        self.keeps_residuals, self.since_meeting = False, 0
        self._passes = 0  # backward passes since the last step of any optimizer that trains the parameters
        # Since the last backward pass: optimizers, the layers that each has exchanged, and the number of steps around it.
        self._stepped: list[tuple[weakref.ref[torch.optim.Optimizer], set[str], int]] = []
        self._is_on_cuda = any(slot.layer.device.type == "cuda" for slot in session.slots.slots)

    @property
    def exchanged(self) -> Collection[int]:
        """The ids of the parameters."""
        return self.optimizers.names.keys()

    def show(self, optimizer: torch.optim.Optimizer) -> None:
        """Show an optimizer's own settings."""
        if (trained := self.optimizers.known(optimizer)) is not None:
            trained.momentum.give_back()

    def show_in(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any], fills: bool) -> None:
        """Show an optimizer's own settings in a copy of its state. fills: with all moments."""
        if (trained := self.optimizers.known(optimizer)) is not None:
            trained.momentum.show_in(saved, fills)

    def note_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Empty the residual of an optimizer whose state was loaded in mid-training: the training goes on from elsewhere.

        A residual that was loaded since its last step stays. Where gradients are exchanged, the state may be this rank's own.
        """
        trained = self.optimizers.known(optimizer)
        if trained is not None and not self.session.reducer.on_updates:
            self.session.membership.note_unlike()
        elif trained is not None:
            trained.momentum.forget()
            trained.is_new = True
            if trained.exchanges and not self.keeps_residuals:
                trained.exchanges = 0
                for bucket in trained.buckets_in(self.session.reducer):  # those of its last step may be of a spec before
                    bucket.empty()

    def forget(self) -> None:
        """Look at all optimizers anew: the spec may have changed, or a step has failed."""
        self.optimizers.forget()
        self.in_step = 0

    def discard(self) -> None:
        """Discard a step, and a backward pass, under way."""
        self._agreement.discard()
        self.gradients.discard()
        self.forget()
        self.has_gradients = self.has_unchecked_gradients = False

    # Around a backward pass.

    def note_left_out(self) -> None:
        """Tell the others where this rank is, if its last pass was not followed by a step: before one that waits for theirs."""
        session = self.session
        is_left_out = self.has_gradients and not self.has_unchecked_gradients and not self.in_step
        if is_left_out and session.membership.met_in is session.network.generation:
            with session.noting_failure():
                self._agreement.begin(BACKWARD, 0, session.reducer.steps_done)
                self._agreement.end()

    def end_backward(self) -> Tensor | None:
        """End a backward pass whose gradients stay this rank's own. Return 0 if all ranks' are finite, otherwise Inf or NaN.

        None where nothing needs to be said: on one rank, or in a closure of a step, whose calls are each rank's own.
        """
        session = self.session
        if session.phases.last is Phase.FAILED:
            session.phases.note("the end of a step")
        self.has_unchecked_gradients = False
        give_up_failed()
        if session.membership.met_in is not session.network.generation:
            session.meet()
        try:
            poison = self.gradients.end()
            if poison is None or self.in_step or session.network.world.size == 1:
                return None
            self._passes += 1
            if self._passes == PASSES_BEFORE_WARNING:
                warn_user(_NO_STEP)
            self._agreement.begin(BACKWARD, 0, session.reducer.steps_done, poison)
            found = self._agreement.end()
            if self._passes in FIRST_COMPARED and not session.reducer.steps_done:
                self._compare(f"{self._passes} backward passes without a step of a torch optimizer")
            return found
        except BaseException as error:
            session.failed(error)
            raise

    def note_backward(self) -> None:
        """Note that a backward pass of this rank's has ended, after which others may step."""
        self._stepped.clear()

    def step_with_others(self) -> None:
        """Take part in the exchanges of other ranks' steps: those that followed this rank's last backward pass."""
        if not self.optimizers.latest() and self.session.network.world.size > 1:
            raise RuntimeError(_NEVER_STEPPED)
        stepped, self._stepped = self._stepped, []
        for each, names, around in stepped:
            self.optimizers.is_inner = around > 0
            if (optimizer := each()) is not None and (momentum := self.before(optimizer)) is not None:
                if (trained := self.optimizers.known(optimizer)) is not None:  # an inner one has exchanged its other layers
                    trained.waiting = [bucket for bucket in trained.waiting if bucket.layout.names[0] in names]
                momentum.hide()
                momentum.decay_weights({id(self.session.slots.parameters[name]) for name in names})
                self.in_step += around
                self.after(optimizer)
                self.in_step -= around
        self.optimizers.is_inner = False

    # Around a step.

    def before(self, optimizer: torch.optim.Optimizer, has_closure: bool = False) -> HiddenMomentum | None:
        """Begin a step. Return the momentum to hide; None if nothing is exchanged. has_closure: gradients may come in it."""
        session, door = self.session, self.session.door
        has_gradients = self.has_gradients or has_closure
        if not session.network.ready or (not has_gradients and makes_state()):
            return None
        if not session.reducer.on_updates:
            if self.optimizers.find_unaveraged(optimizer):
                session.average_optimizers()
            return None
        waits = self.has_unchecked_gradients or not (self.has_seen_gradients or has_closure)
        if door.needs_gradients and (waits or door.calls_another(optimizer, has_gradients)):
            return None
        if (trained := self.optimizers.find_stepping(optimizer, self.given_momentum)) is None:
            return None
        if session.phases.last is Phase.FAILED:
            session.phases.note("the optimizer's step")
        if session.membership.met_in is not session.network.generation:
            session.meet()
        try:
            if trained.reducer is not session.reducer:
                self._regroup(optimizer, trained)
            self._begin(optimizer, trained)
        except BaseException as error:
            session.failed(error)
            raise
        return trained.momentum

    def _regroup(self, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        """Find the buckets of an optimizer that is new, or that the session's present ones have not seen."""
        session = self.session
        if trained.added and session.network.world.size > 1:
            warn_user(_ADDED.format(name=class_of(optimizer).__name__, shape=tuple(trained.added[0].shape)))
        if (sums := session.door.adds_up(optimizer)) is not None:
            session.sums = sums
        if session.sums and trained.momentum.divides:
            raise ValueError(_SUMS.format(name=class_of(optimizer).__name__))
        if self.optimizers.parts != session.reducer.parts:
            old = session.reducer
            session.reducer = state.regroup(old, session.make_reducer(session.compressor))
            self._carry_starts(old, session.reducer)

    def _begin(self, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        """Copy the weights before a step, whose momentum is hidden next. One that super().step() begins has begun."""
        if trained.has_begun:
            trained.inside += 1
            return
        if torch._C._current_graph_task_id() >= 0 or not trained.exchanges or self._is_on_cuda:
            self._check(optimizer)
        reducer = self.session.reducer
        if trained.reducer is not reducer:
            trained.find_buckets(reducer)
        if trained.clips:
            self._clip(optimizer, trained)
        if trained.is_new:
            self._take_undelivered(trained)
        trained.has_begun = True
        self.in_step += 1
        trained.waiting = [*trained.buckets]
        for bucket in trained.buckets:
            assert bucket.progress is not None
            bucket.progress.begin()
        if reducer.context.uses_rates:
            reducer.context.layer_rates = layer_rates(self.optimizers.names, [optimizer])

    def _carry_starts(self, old: Reducer, new: Reducer) -> None:
        """Go on with other buckets in the middle of a step, when one that it calls is found."""
        if not self.in_step:
            return
        starts = _starts(old.buckets)
        for bucket in new.buckets:
            assert bucket.progress is not None
            for name, start in bucket.layout.views(bucket.progress.start).items():
                start.copy_(starts[name])
        for each in self.optimizers.every():
            if each.has_begun:
                waiting = {name for bucket in each.waiting for name in bucket.layout.names}
                each.find_buckets(new)
                each.waiting = [bucket for bucket in each.buckets if bucket.layout.names[0] in waiting]

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange the updates of an optimizer that has stepped.

        Of optimizers that call one another, the innermost exchanges a layer's, once.
        """
        if (trained := self.optimizers.known(optimizer)) is None or not trained.has_begun:
            return
        if trained.inside:
            trained.inside -= 1
            return
        try:
            self._exchange(optimizer, trained)
        except BaseException as error:
            self.session.failed(error)
            raise
        self.has_gradients = False
        session = self.session
        if session.announcement.is_due:
            session.announcement.say(session.spec, of_updates(optimizer, self.optimizers), session.turns)
        if session.turns is not None:
            session.turns.note_step()
            if not self.in_step:
                session.take_turn()

    def _exchange(self, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        if self.optimizers.taken:
            self.optimizers.share_taken(optimizer, is_inner=self.in_step > 1)
        trained.momentum.show()
        trained.has_begun = False
        self.in_step -= 1
        buckets, trained.waiting = trained.waiting, []
        if self.in_step:
            self._leave_out(buckets)
        assert trained.reducer is not None
        size = self.session.network.world.size
        skipped = getattr(optimizer, "found_inf", None)  # a GradScaler sets it where the optimizer itself skips its step
        on_cpu = (skipped != 0).float() if isinstance(skipped, Tensor) and not skipped.is_cuda else None
        try:
            if size > 1:
                if buckets and not trained.exchanges and (said := why_unsuited(optimizer)):
                    warn_user(said)
                self._agreement.begin(STEP, trained.number, trained.reducer.steps_done, on_cpu)
            if on_cpu is not None:
                of_ranks = self._agreement.end()
                if (on_cpu if of_ranks is None else of_ranks) == size:  # one that skips it alone offers nothing
                    return
            self._note_rules(optimizer, trained)
            for bucket in buckets:
                assert bucket.progress is not None
                bucket.progress.skipped = skipped if isinstance(skipped, Tensor) else None  # 0 where nothing has a gradient
                if trained.momentum.normalizes and bucket.progress.noise.are_unlike:
                    slots = [trained.reducer.slots[name] for name in bucket.layout.names]
                    bucket.progress.noise.moments = trained.momentum.second_moments(slots)
            trained.reducer.run(buckets, float(size) if self.session.sums else 1.0, self._agreement)
            if not buckets:
                self._agreement.end()
        except BaseException:
            for bucket in buckets:
                assert bucket.progress is not None
                if not bucket.has_started:  # this rank alone has stepped
                    bucket.progress.go_back()
            raise
        trained.exchanges += 1
        self.since_meeting += 1
        if size > 1 and (self.since_meeting in FIRST_COMPARED or self.since_meeting % COMPARED_EVERY == 0):
            self._compare(f"{self.since_meeting} steps")
        self._passes = 0
        self._stepped.append((weakref.ref(optimizer), {name for each in buckets for name in each.layout.names}, self.in_step))

    def _compare(self, count: str) -> None:
        """Warn if the ranks' weights are not equal. Those of a step under way, which calls this one, count as before it."""
        session = self.session
        network, elsewhere = session.network, exchanged_by_later(session)
        starts = _starts(bucket for each in self.optimizers.every() if each.has_begun for bucket in each.waiting)
        weights = {name: starts.get(name, p) for name, p in session.slots.parameters.items() if id(p) not in elsewhere}
        every = gather(network, digests(weights, counts=not self.lags), "a comparison of the ranks' weights")()
        found = {network.world.number(rank): each.tolist() for rank, each in enumerate(every)}
        if parted := differences([*weights], found):
            warn_user(_APART.format(count=count, parted=parted))

    def give_up(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo a step that has raised an error: it exchanges nothing."""
        trained = self.optimizers.known(optimizer)
        if trained is None or not trained.has_begun:
            return
        trained.momentum.show()
        trained.has_begun, trained.inside = False, 0
        self.in_step -= 1
        for bucket in trained.waiting:
            assert bucket.progress is not None
            bucket.progress.go_back()

    def _leave_out(self, exchanged: Sequence[Bucket]) -> None:
        """Leave buckets out of the steps that have called this one. Those with nothing else exchange nothing."""
        for each in self.optimizers.every():
            if each.has_begun:
                each.waiting = [bucket for bucket in each.waiting if bucket not in exchanged]
                if not each.waiting:
                    each.momentum.show()
                    each.has_begun, each.inside = False, 0
                    self.in_step -= 1

    def _note_rules(self, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        """Tell the buckets how the optimizer's step is to go into their residuals. Another one's step may have come before."""
        groups, momentum = optimizer.param_groups, trained.momentum
        values = [] if momentum.rule is None else [group[momentum.rule.setting] for group in groups]
        rates: list[float] = []
        if momentum.normalizes and any(each.progress and each.progress.noise.factor != 1 for each in trained.buckets):
            rates = [decay_of(optimizer, group) for group in groups]
        if trained.settings != (values, rates):
            trained.settings = values, rates
            of_layer = {id(each): momentum.of(group) for group in groups for each in group["params"]}
            decays = {id(each): rate for group, rate in zip(groups, rates, strict=False) for each in group["params"]}
            trained.rules = []
            for bucket in trained.buckets:
                params = [self.session.slots.parameters[name] for name in bucket.layout.names]
                of_bucket = [decays[id(each)] for each in params] if any(rates) else []
                trained.rules.append(StepRule(of_layer[id(params[0])], momentum.normalizes, of_bucket))
        for bucket, rule in zip(trained.buckets, trained.rules, strict=True):
            assert bucket.progress is not None
            bucket.progress.rule = rule

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what an exchange after the step cannot serve."""
        name = class_of(optimizer).__name__
        if torch._C._current_graph_task_id() >= 0:
            raise RuntimeError(_IN_BACKWARD.format(name=name))
        refuse_unsuited(optimizer, self.session.network.world.size)
        if self._is_on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(_CAPTURED.format(name=name))

    def _clip(self, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        """Cut this rank's gradients, where the spec says clip=. A fused optimizer divides them by a loss scale in its step."""
        scale = getattr(optimizer, "grad_scale", None)
        for bucket in trained.buckets:
            if (feedback := bucket.feedback) is None or not feedback.clip:
                continue
            parameters = self.session.slots.parameters
            names = parameters if feedback.clip_by == "model" else bucket.layout.names  # a second cut finds the norm it wants
            grads = [parameters[name].grad for name in names]
            there = [local(each) for each in grads if each is not None and not each.is_sparse]
            feedback.cut(there, self.session.network.world, scale if isinstance(scale, Tensor) else None)

    def _take_undelivered(self, trained: Trained) -> None:
        """Put what the optimizer's moments have not delivered of earlier gradients into the residual, once."""
        trained.is_new = False
        at = {name: (bucket, span) for bucket in trained.buckets for name, span in _spans(bucket)}
        for parameter, step in trained.momentum.take_undelivered():
            name = self.optimizers.names.get(id(parameter))
            if name in at:
                bucket, (begin, end) = at[name]
                slot = self.session.slots.slot(parameter)
                assert slot is not None and bucket.progress is not None
                bucket.progress.make_ages()
                # All ranks have the same moment, of the sum: each adds its share of it.
                share = 1 / self.session.network.world.size if self.session.sums else 1.0
                bucket.progress.residual[begin:end].add_(slot.flat(step).float(), alpha=share)


def _starts(buckets: Iterable[Bucket]) -> dict[str, Tensor]:
    """Return the weights before the steps under way, by layer."""
    return {name: each for of in buckets if of.progress for name, each in of.layout.views(of.progress.start).items()}


def _spans(bucket: Bucket) -> Iterator[tuple[str, tuple[int, int]]]:
    return zip(bucket.layout.names, bucket.layout.spans, strict=True)
