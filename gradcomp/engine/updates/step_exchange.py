"""The exchange of updates around the steps of the user's optimizers.

Each optimizer steps on its rank's own gradients, as if it were alone. Before a step the weights are copied. After it, start
minus now goes into the residual, the ranks exchange what their compressors take from it, and the weights become start minus the
mean, equal to the last bit on all ranks. What the program does to its gradients between backward() and step() needs no code.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcomp.engine.bucket import Bucket
from gradcomp.engine.context import layer_rates
from gradcomp.engine.feedback import cut_factors
from gradcomp.engine.reducer import Reducer
from gradcomp.engine.slots import Slots, local
from gradcomp.engine.updates import steps
from gradcomp.engine.updates.agreement import BACKWARD, STEP, Agreement, LocalGradients
from gradcomp.engine.updates.hidden_momentum import HiddenMomentum, Momentum, class_of, decay_of
from gradcomp.engine.updates.progress import StepRule
from gradcomp.native.memory import Memory
from gradcomp.networks import Connection

_IN_BACKWARD = (
    "{name}.step() was called within backward(), where no updates can be exchanged: call it after backward(), or take the spec "
    '"blocks", which exchanges gradients'
)
_SHARDED = (
    "{name} steps a part of the parameters on each rank, with gradients that must be equal everywhere, and this spec exchanges "
    'updates after the step: take the spec "blocks", which exchanges gradients, or an optimizer that is whole on each rank'
)
_LBFGS = (
    "LBFGS takes its next direction from how its own steps have changed the gradient, and with this spec other ranks move the "
    'weights, too: it would diverge. Take the spec "blocks", which exchanges gradients, or another optimizer'
)
_CAPTURED = (
    "{name}.step() is captured in a CUDA graph, which would repeat one step's exchange: capture forward and backward passes, "
    'and call step() outside of the graph, or take the spec "blocks"'
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
_UNFROZEN = (
    "{name!r} of shape {shape} was frozen when gradcomp was set up, so no rank exchanges it. Leave it trainable until then, "
    "and call requires_grad_(False) afterwards, until you train it"
)


@dataclass(eq=False)
class Trained:
    """An optimizer that trains some of the parameters.

    number: by which ranks name it. names: of its layers. momentum: hidden while it steps. never_exchanged: its parameters that
    were frozen at set-up, by name. exchanges: done after its steps since a state was loaded. has_begun: its step is under way;
    inside: steps of its own that this one has called. is_new: what its moments have not delivered yet is to go into the
    residual. reducer, buckets: those of its layers. waiting: those that no inner step has exchanged. clips: some of them cut
    the gradients. rules: of the buckets. settings: of the groups, when the rules were made.
    """

    number: int
    names: frozenset[str]
    momentum: HiddenMomentum
    never_exchanged: Sequence[tuple[str, torch.nn.Parameter]] = ()
    exchanges: int = 0
    has_begun: bool = False
    inside: int = 0
    is_new: bool = True
    reducer: Reducer | None = None
    buckets: list[Bucket] = field(default_factory=list)
    waiting: list[Bucket] = field(default_factory=list)
    clips: bool = False
    rules: list[StepRule] = field(default_factory=list)
    settings: Any = ()

    def find_buckets(self, reducer: Reducer) -> None:
        """Find the buckets of its layers."""
        self.reducer, self.settings = reducer, ()
        self.buckets = [each for each in reducer.buckets if each.layout.names[0] in self.names]
        self.clips = any(each.feedback is not None and each.feedback.clip for each in self.buckets)


class StepExchange:
    """What an exchange of updates knows of the optimizers that step, and the acts around their steps."""

    def __init__(self, slots: Slots, network: Connection):
        self._slots, self._network = slots, network
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[tuple[int, ...], Trained | None]]
        self._known = weakref.WeakKeyDictionary()  # with their groups, by which another parameter in them is noticed
        self.name_parameters()
        self._latest: dict[str, weakref.ref[torch.optim.Optimizer]] = {}  # of each layer
        self._is_on_cuda = any(slot.layer.device.type == "cuda" for slot in slots.slots)
        # The momentum of each layer, of the optimizers that train the same layers. An optimizer's number is its place here.
        self._sets: list[dict[str, Momentum]] = [dict.fromkeys(self._names.values(), Momentum())]
        self.parts: dict[str, Hashable] | None = None  # of each layer (see _divide)
        self.gradients, self._agreement = LocalGradients(Memory()), Agreement(network)
        self._passes = 0  # backward passes since the last step of any optimizer that trains the parameters
        self._adds_up = False  # updates are sums over the ranks
        self.in_step = 0  # steps under way, as in a closure
        self._stepped: list[weakref.ref[torch.optim.Optimizer]] = []  # since the last backward pass
        self.keeps_residuals = False  # also where an optimizer's state is loaded
        self.has_moments = True  # a first moment in an optimizer's state is of gradients before the exchange of updates

    @property
    def exchanged(self) -> Collection[int]:
        """The ids of the parameters."""
        return self._names.keys()

    # The optimizers.

    def renew_parameters(self) -> None:
        """Take other parameters that the model has got in place of its own."""
        if self._slots.renew():
            self.name_parameters()

    def name_parameters(self) -> None:
        """Note the parameters, which may be new, and look at all optimizers anew."""
        self._names = {id(slot.parameter): slot.name for slot in self._slots.slots}
        self._known = weakref.WeakKeyDictionary({each: ((), of[1]) for each, of in self._known.items()})

    def find(self, optimizer: torch.optim.Optimizer, given: Momentum | None = None) -> Trained | None:
        """Find an optimizer. Return None if it trains none of the parameters. given: the spec's momentum."""
        seen = (steps.changes, *[each for group in optimizer.param_groups for each in (id(group), len(group["params"]))])
        known = self._known.get(optimizer)
        if known is None or known[0] != seen:
            found = self._look_at(optimizer, given, None if known is None else known[1])
            known = self._known[optimizer] = seen, found
        return known[1]

    def find_stepping(self, optimizer: torch.optim.Optimizer, given: Momentum | None) -> Trained | None:
        """Find an optimizer that is about to step. Refuse it if a layer has a gradient that no rank exchanges."""
        found = self.find(optimizer, given)
        for name, parameter in () if found is None else found.never_exchanged:
            if parameter.requires_grad and parameter.grad is not None:
                raise RuntimeError(_UNFROZEN.format(name=name, shape=tuple(parameter.shape)))
        return found

    def _look_at(self, optimizer: torch.optim.Optimizer, given: Momentum | None, before: Trained | None) -> Trained | None:
        group_of = {id(each): group for group in optimizer.param_groups for each in group["params"]}
        if self._names.keys().isdisjoint(group_of):
            return None
        momentum = HiddenMomentum(optimizer, given, self._names, steps.exchanged())
        momenta = {name: momentum.of(group_of[number]) for number, name in self._names.items() if number in group_of}
        number = next((i for i, each in enumerate(self._sets) if each.keys() == momenta.keys()), len(self._sets))
        self._sets[number : number + 1] = [momenta]
        self._latest |= dict.fromkeys(momenta, weakref.ref(optimizer))
        found = Trained(number, frozenset(momenta), momentum, is_new=self.has_moments)
        found.never_exchanged = [(name, each) for name, each in self._slots.without_gradient if id(each) in group_of]
        if before is not None:
            found.is_new, found.exchanges = before.is_new, before.exchanges
        self.parts = self._divide()
        return found

    def _divide(self) -> dict[str, Hashable] | None:
        """Return the part of each layer: layers of the same optimizers, and momenta, share buckets. None: all are of one.

        A momentum that a schedule changes later is that of its bucket's first layer. What an optimizer trained that is gone
        stays divided: when it goes differs between ranks.
        """
        parts: dict[str, Hashable] = {
            name: tuple([(i, each[name]) for i, each in enumerate(self._sets) if name in each]) for name in self._sets[0]
        }
        return parts if len({*parts.values()}) > 1 else None

    def adds_up(self, optimizer: torch.optim.Optimizer, trained: Trained, op: bool | None, before: bool) -> bool:
        """Say whether updates are sums over the ranks. op: what the optimizer's door knows of it; None: as before."""
        sums = before if op is None else op
        if sums and trained.momentum.divides:
            raise ValueError(_SUMS.format(name=class_of(optimizer).__name__))
        self._adds_up = sums
        return sums

    def show(self, optimizer: torch.optim.Optimizer) -> None:
        """Show an optimizer's own settings."""
        if (trained := self.trained(optimizer)) is not None:
            trained.momentum.give_back()

    def note_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Empty the residual of an optimizer whose state was loaded in mid-training: the training goes on from elsewhere.

        A residual that was loaded since its last step stays.
        """
        trained = self.trained(optimizer)
        if trained is None:
            return
        trained.momentum.forget()
        if not trained.exchanges or self.keeps_residuals:
            return
        trained.exchanges = 0
        for bucket in trained.buckets:
            bucket.empty()

    def trained(self, optimizer: torch.optim.Optimizer) -> Trained | None:
        """Return what is known of an optimizer, without a look at its groups."""
        known = self._known.get(optimizer)
        return None if known is None else known[1]

    def _every(self) -> list[Trained]:
        return [trained for _, trained in self._known.values() if trained is not None]

    def give_up(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo a step that has raised an error: it exchanges nothing."""
        trained = self.trained(optimizer)
        if trained is None or not trained.has_begun:
            return
        trained.momentum.show()
        trained.has_begun, trained.inside = False, 0
        self.in_step -= 1
        for bucket in trained.waiting:
            assert bucket.progress is not None
            bucket.progress.go_back()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """List the optimizers that have last trained the parameters, in the same order on all ranks."""
        latest = [self._latest[name]() for name in self._sets[0] if name in self._latest]
        return list(dict.fromkeys(each for each in latest if each is not None))

    def forget(self) -> None:
        """Look at all optimizers anew: the spec may have changed, or a step has failed."""
        for each in self._every():
            each.momentum.give_back()
            each.has_begun, each.inside = False, 0
        self._known = weakref.WeakKeyDictionary({each: ((), of[1]) for each, of in self._known.items()})
        self.in_step = 0

    def note_change(self, *, to_updates: bool) -> None:
        """Note a change of spec, or a loaded state. to_updates: from gradients, so that the moments are of these."""
        self.has_moments = to_updates
        for each in self._every():
            each.is_new, each.exchanges = to_updates, 0

    def discard(self) -> None:
        """Discard a step, and a backward pass, under way."""
        self._agreement.discard()
        self.gradients.discard()
        self.forget()

    # Around a backward pass, and a step.

    def end_backward(self, step: int) -> Tensor | None:
        """End a backward pass. Return 0 if all ranks' gradients are finite, otherwise Inf or NaN; None if nobody is asked."""
        poison = self.gradients.end()
        if poison is None or self.in_step or self._network.world.size == 1:
            return None
        self._passes += 1
        if self._passes == PASSES_BEFORE_WARNING:
            steps.warn_user(_NO_STEP)
        self._agreement.begin(BACKWARD, 0, step, poison)
        return self._agreement.end()

    def note_backward(self) -> None:
        """Note that a backward pass of this rank's has ended, after which others may step."""
        self._stepped.clear()

    def take_stepped(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that have stepped since this rank's last backward pass, and forget them."""
        if not self.optimizers() and self._network.world.size > 1:
            raise RuntimeError(_NEVER_STEPPED)
        stepped, self._stepped = self._stepped, []
        return [optimizer for each in stepped if (optimizer := each()) is not None]

    def begin(self, optimizer: torch.optim.Optimizer, trained: Trained, reducer: Reducer) -> None:
        """Copy the weights before a step, whose momentum is hidden next. One that super().step() begins has begun."""
        if trained.has_begun:
            trained.inside += 1
            return
        if torch._C._current_graph_task_id() >= 0 or not trained.exchanges or self._is_on_cuda:
            self._check(optimizer)
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
        if reducer.rates_need != "unused":
            reducer.layer_rates = layer_rates(self._names, [optimizer])

    def carry_starts(self, old: Reducer, new: Reducer) -> None:
        """Go on with other buckets in the middle of a step, when one that it calls is found."""
        if not self.in_step:
            return
        starts = {name: each for of in old.buckets if of.progress for name, each in of.layout.views(of.progress.start).items()}
        for bucket in new.buckets:
            assert bucket.progress is not None
            for name, start in bucket.layout.views(bucket.progress.start).items():
                start.copy_(starts[name])
        for each in self._every():
            if each.has_begun:
                waiting = {name for bucket in each.waiting for name in bucket.layout.names}
                each.find_buckets(new)
                each.waiting = [bucket for bucket in each.buckets if bucket.layout.names[0] in waiting]

    def end(self, optimizer: torch.optim.Optimizer, trained: Trained, scale: float) -> None:
        """Exchange the progress of a step. Of optimizers that call one another, the innermost exchanges a layer's, once."""
        if trained.inside:
            trained.inside -= 1
            return
        trained.momentum.show()
        trained.has_begun = False
        self.in_step -= 1
        buckets, trained.waiting = trained.waiting, []
        if self.in_step:
            self._leave_out(buckets)
        assert trained.reducer is not None
        try:
            if self._network.world.size > 1:
                self._agreement.begin(STEP, trained.number, trained.reducer.steps_done)
            skipped = getattr(optimizer, "found_inf", None)  # a GradScaler sets it where the optimizer itself skips its step
            if isinstance(skipped, Tensor) and not skipped.is_cuda and bool(skipped):
                self._agreement.end()
                return
            self._note_rules(optimizer, trained)
            for bucket in buckets:
                assert bucket.progress is not None
                bucket.progress.skipped = skipped
            trained.reducer.run(buckets, scale, self._agreement)
            if not buckets:
                self._agreement.end()
        except BaseException:
            for bucket in buckets:
                assert bucket.progress is not None
                if not bucket.has_started:  # this rank alone has stepped
                    bucket.progress.go_back()
            raise
        trained.exchanges += 1
        self._passes = 0
        self._stepped.append(weakref.ref(optimizer))

    def _leave_out(self, exchanged: Sequence[Bucket]) -> None:
        """Leave buckets out of the steps that have called this one. Those with nothing else exchange nothing."""
        for each in self._every():
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
                params = [self._slots.parameters[name] for name in bucket.layout.names]
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
        if name == "LBFGS" and self._network.world.size > 1:
            raise RuntimeError(_LBFGS)
        if name == "ZeroRedundancyOptimizer":
            raise RuntimeError(_SHARDED.format(name=name))
        if self._is_on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(_CAPTURED.format(name=name))

    @torch.no_grad()
    def _clip(self, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        """Cut this rank's gradients, where the spec says clip=. A fused optimizer divides them by a loss scale in its step."""
        scale = getattr(optimizer, "grad_scale", None)
        for bucket in trained.buckets:
            feedback = bucket.feedback
            if feedback is None or not feedback.clip:
                continue
            grads = [self._slots.parameters[name].grad for name in bucket.layout.names]
            there = [local(each) for each in grads if each is not None and not each.is_sparse]
            if there:
                squares = torch.stack([each.double().square().sum() for each in there])
                if isinstance(scale, Tensor):
                    squares /= scale.to(squares.device, non_blocking=True).double() ** 2
                bound, whole_model = feedback.clip / math.sqrt(self._network.world.size), feedback.clip_by == "model"
                torch._foreach_mul_(there, [*cut_factors(bound, squares, whole_model).unbind()])

    def _take_undelivered(self, trained: Trained) -> None:
        """Put what the optimizer's moments have not delivered of earlier gradients into the residual, once."""
        trained.is_new = False
        at = {name: (bucket, span) for bucket in trained.buckets for name, span in _spans(bucket)}
        for parameter, step in trained.momentum.take_undelivered():
            name = self._names.get(id(parameter))
            if name in at:
                bucket, (begin, end) = at[name]
                slot = self._slots.slot(parameter)
                assert slot is not None and bucket.progress is not None
                bucket.progress.make_ages()
                # All ranks have the same moment, of the sum: each adds its share of it.
                share = 1 / self._network.world.size if self._adds_up else 1.0
                bucket.progress.residual[begin:end].add_(slot.flat(step).float(), alpha=share)


def _spans(bucket: Bucket) -> Iterator[tuple[str, tuple[int, int]]]:
    return zip(bucket.layout.names, bucket.layout.spans, strict=True)
